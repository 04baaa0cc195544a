import torch
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    scaler.scale(model(x)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm.isnan() or norm > limit:
        optimizer.zero_grad()
    scaler.step(optimizer)
    scaler.update()
    loss = other(x)
    loss.backward()
    if loss > 100:
        second.zero_grad()
    second.step()
