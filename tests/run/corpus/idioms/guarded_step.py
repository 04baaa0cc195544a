import math

import torch
from torch import nn

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for i in range(8):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    if i in (2, 5):
        model[0].weight.grad[0, 0] = math.inf
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        scaler.step(opt)
    else:
        print("skip")
    scaler.update()
    print(scaler.get_scale())
show(model, scaler)
