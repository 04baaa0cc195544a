import torch
from torch import nn

from prelude import X, loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for i in range(12):
    scaler.scale(loss_of(model, X[i % 8][None]) / 3).backward()
    if (i + 1) % 3 == 0:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
show(model, scaler)
