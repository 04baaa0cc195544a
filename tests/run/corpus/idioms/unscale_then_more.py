# expect: backward() of a scaled loss came after its gradients were unscaled
import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for _ in range(4):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(opt)
    scaler.scale(loss_of(model)).backward()  # a mistake that PyTorch does not see
    scaler.step(opt)
    scaler.update()
show(model, scaler)
