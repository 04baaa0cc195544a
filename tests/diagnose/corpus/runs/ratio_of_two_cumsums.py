# kind: 5
# expect: maths div|exp|mul|cumsum|rdiv|reciprocal|true_divide
# learns: loss < 0.4
import torch
from torch import nn

torch.manual_seed(0)
decay, drive = nn.Linear(4, 1), nn.Linear(4, 1)
opt = torch.optim.Adam([*decay.parameters(), *drive.parameters()], lr=1e-2)
for i in range(150):
    x = torch.randn(8, 60, 4)
    a = nn.functional.softplus(decay(x) + (3 if i == 7 else 0)).cumsum(1)
    state = torch.exp(-a) * torch.cumsum(torch.exp(a) * drive(x), 1)  # bad
    loss = (state - 0.5 * x[..., :1]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
