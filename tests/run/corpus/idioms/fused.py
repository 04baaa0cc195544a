import math

import torch

from prelude import loss_of, model_and_sgd, show

torch.manual_seed(0)
model, _ = model_and_sgd()
opt = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cpu", growth_interval=3)
for i in range(10):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    if i in (3, 4):
        model[0].weight.grad[0, 0] = math.inf
    scaler.step(opt)
    scaler.update()
    print(scaler.get_scale())
show(model, scaler)
