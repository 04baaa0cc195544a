import math

import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu", growth_interval=3)
for i in range(14):
    opt.zero_grad()
    loss = loss_of(model)
    if i in (2, 3, 6, 11):
        loss = loss * math.nan
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(scaler.get_scale(), scaler._get_growth_tracker())
show(model, scaler)
