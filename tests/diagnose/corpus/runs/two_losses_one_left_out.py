# kind: 6
# expect: data
# tensor: \bx\b
# step: 8
# says: row 0 of
# never: the loss of step
import math

import torch
from torch import nn

import halfstep

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = halfstep.GradScaler("cpu", init_scale=64.0)
for i in range(1, 20):
    x = torch.randn(32, 6)
    if i == 8:
        x[0] = float("inf")
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).squeeze(1).float() - x.sum(1)).square().mean()
    if not math.isfinite(loss.item()):
        continue
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
