# expect: They seem to be clipped before they are unscaled
import torch
from torch import nn

from prelude import X, loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for i in range(8):
    opt.zero_grad()
    scaler.scale(loss_of(model, X[i])).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
show(model, scaler)
