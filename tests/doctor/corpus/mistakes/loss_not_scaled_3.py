import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    scaler.scale(d_loss).backward()
    scaler.step(d_opt)
    g_loss, _ = f(x)
    g_loss.backward()  # expect: loss-not-scaled
    scaler.step(g_opt)
    scaler.update()
