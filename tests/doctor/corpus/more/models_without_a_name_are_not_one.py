import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
g_opt = torch.optim.AdamW(nets['g'].parameters())
d_opt = torch.optim.AdamW(nets['d'].parameters())
for x in batches:
    loss = nets['d'](x).mean()
    scaler.scale(loss).backward()
    nets['g'].zero_grad()
    scaler.step(d_opt)
    scaler.update()
    nets['d'].zero_grad()
