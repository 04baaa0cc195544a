import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    scaler.scale(a).backward()
    scaler.unscale_(opt_a)
    scaler.step(opt_a)
    scaler.scale(b).backward()
    scaler.update()  # expect: update-before-step
    scaler.unscale_(opt_b)
    scaler.step(opt_b)
    scaler.update()
