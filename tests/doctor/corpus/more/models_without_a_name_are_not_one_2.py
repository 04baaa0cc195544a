import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
g_opt = torch.optim.AdamW(make(0).parameters())
d_opt = torch.optim.AdamW(make(1).parameters())
for x in batches:
    loss = make(1)(x).mean()
    scaler.scale(loss).backward()
    make(0).zero_grad()
    scaler.step(d_opt)
    scaler.update()
    make(1).zero_grad()
