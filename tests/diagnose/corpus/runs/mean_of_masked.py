# kind: 5
# expect: maths div|true_divide
# learns: error < 0.1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(25):
    x = torch.randn(16, 5, 6)
    mask = (torch.rand(16, 5) > 0.3).float()
    if i == 4:
        mask[3] = 0
    mean = (model(x).squeeze(-1) * mask).sum(1) / mask.sum(1)  # bad
    goal = (x[..., 0] * mask).sum(1) / mask.sum(1).clamp_min(1)
    loss = (mean - goal).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
x = torch.randn(500, 6)
error = (model(x).squeeze(-1) - x[:, 0]).square().mean().item()
