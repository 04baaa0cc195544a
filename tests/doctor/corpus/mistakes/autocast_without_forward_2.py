import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
criterion.to(device)
for x, y in batches:
    output = network(x)
    parts = [output, y]
    with autocast('cuda'):  # expect: autocast-without-forward
        loss = criterion(parts, weights)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
