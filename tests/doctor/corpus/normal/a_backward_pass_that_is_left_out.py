import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for x in batches:
    loss = model(x)
    if loss.requires_grad:
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
