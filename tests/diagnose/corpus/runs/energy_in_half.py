# kind: 4
# expect: range
# never: not finite in float32 either
# learns: loss < 0.3
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(150):
    x = torch.randn(32, 6)
    if i == 5:
        x[3] *= 40
    energy = x.half().square().sum(1) * 50  # bad
    goal = energy.float().div(50).clamp_max(12).log1p()
    loss = (model(x.clamp(-3, 3)).squeeze(1) - goal / energy.float() * energy).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
