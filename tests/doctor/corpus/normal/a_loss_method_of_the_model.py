import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for x in batches:
    with autocast('cuda'):
        loss = model.loss(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
