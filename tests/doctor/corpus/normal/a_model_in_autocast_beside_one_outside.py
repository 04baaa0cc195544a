import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
criterion.to(device)
for x, y in batches:
    output = network(x)
    
    with autocast('cuda'):
        loss = criterion(network(output), weights)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
