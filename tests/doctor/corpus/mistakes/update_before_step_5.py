import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.update()  # expect: update-before-step
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
