# kind: 4
# expect: range _to_copy
# says: x = \(years\[:, None\] / 1000\)\.half\(\)
# says: the loss falls
# never: clamp
# step: 20
# learns: loss < 0.2
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).half()
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(1, 41):
    years = torch.rand(32) * (60000 if step < 20 else 90000)
    x = years.half()[:, None] / 1000  # bad
    y = (years / 90000)[:, None]
    loss = (model(x).float() - y).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
