# kind: 5
# expect: maths sqrt
# says: of Adam on this batch.*: the loss falls from \d
# learns: lengths[-1] > 0.5
import torch
from torch import nn

torch.manual_seed(29)
critic = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1))
nn.init.zeros_(critic[-1].weight)  # so that its slope is 0
opt = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
lengths = []
for i in range(1, 22):
    point = torch.randn(64, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(critic(point).sum() - 100, point, create_graph=True)
    length = slope.pow(2).sum(1).sqrt()  # bad
    loss = 10 * (length - 1).pow(2).mean() + 2e-3 * critic(point).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    lengths.append(length.mean().item())
