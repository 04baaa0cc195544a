import math

import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for i in range(6):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    if i > 1:
        model[0].weight.grad[0, 0] = math.inf
    scaler.step(opt)
    scaler.update()
    if scaler._scale < 128:
        scaler._scale = torch.tensor(128.0).to(scaler._scale)
    print(scaler.get_scale())
show(model, scaler)
