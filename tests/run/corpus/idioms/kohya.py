import torch

from prelude import X, loss_of, model_and_sgd, show

model, opt = model_and_sgd(torch.float16)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
org = scaler._unscale_grads_

def replacer(optimizer, inv_scale, found_inf, allow_fp16):
    return org(optimizer, inv_scale, found_inf, True)

scaler._unscale_grads_ = replacer
for _ in range(6):
    opt.zero_grad()
    scaler.scale(loss_of(model, X.half()).float()).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
show(model, scaler)
