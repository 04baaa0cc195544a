import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(d_opt)
    torch.nn.utils.clip_grad_norm_(g.parameters(), 1.0)
    scaler.step(g_opt)  # expect: unscale-of-another
    scaler.update()
