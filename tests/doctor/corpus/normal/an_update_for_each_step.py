import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    scaler.scale(a).backward()
    scaler.step(opt_a)
    scaler.update()
    opt_b.zero_grad()
    scaler.scale(b).backward()
    scaler.step(opt_b)
    scaler.update()
