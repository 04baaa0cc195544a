import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.step()  # expect: step-twice
