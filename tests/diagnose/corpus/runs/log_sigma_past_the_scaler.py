# kind: 1
# expect: optimizer
# says: still multiplied by the scale
# never: in the forward pass|in the backward pass|was not finite
# step: 1
import torch
from torch import nn

import halfstep

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
log_sigma = nn.Parameter(torch.zeros(()))
of_model = torch.optim.Adam(model.parameters(), lr=1e-3)
of_sigma = torch.optim.SGD([log_sigma], lr=1e-2)
scaler = halfstep.GradScaler("cpu", on_skips=lambda report: None)
for i in range(7):
    x = torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        error = (model(x) - x.sum(1, keepdim=True)).float()
        loss = (error.square() * torch.exp(-log_sigma) + log_sigma).mean()
    of_model.zero_grad()
    of_sigma.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(of_model)
    of_sigma.step()
    scaler.update()
