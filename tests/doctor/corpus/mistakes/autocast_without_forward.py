import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for x, y in batches:
    output = model(x)
    with autocast('cuda'):  # expect: autocast-without-forward
        loss = F.mse_loss(output, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
