# kind: 2
# expect: growth
# cure: ^MultiplicativeLR raised .*: bound what its function returns
# never: init_scale
import torch
from torch import nn

import halfstep

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
rates = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 1.1)
scaler = halfstep.GradScaler("cpu", init_scale=1024.0, on_skips=lambda report: None)
for i in range(1, 81):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    rates.step()
