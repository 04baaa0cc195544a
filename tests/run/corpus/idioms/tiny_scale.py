import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-2)
for _ in range(5):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.step(opt)
    scaler.update()
show(model, scaler)
