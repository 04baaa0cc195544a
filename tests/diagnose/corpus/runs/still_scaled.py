# kind: 1
# expect: optimizer
# says: still multiplied by the scale
# cure: scaler\.step\(|unscale_
# step: 1
import torch
from torch import nn

import halfstep

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = halfstep.GradScaler("cpu", init_scale=1024.0)
for i in range(20):
    x = torch.randn(32, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).squeeze(1).float() - x.sum(1)).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    opt.step()  # bad
    scaler.update(1024.0)
