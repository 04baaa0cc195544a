import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
sparse = torch.optim.SparseAdam(table.parameters())
for x, y in batches:
    optimizer.zero_grad()
    sparse.zero_grad()
    with autocast("cpu", torch.float16, enabled=scaler is not None):
        loss = F.mse_loss(model(table(x)), y)
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(sparse)
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
        sparse.step()  # expect: step-missing
