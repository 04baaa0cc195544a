# kind: 2
# expect: maths sqrt
# step: 1
# cure: \+ 1e-
# learns: gap.item() < 0.5
import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
nn.init.zeros_(critic[2].weight)
opt = torch.optim.Adam(critic.parameters(), lr=1e-2)
for _ in range(7):
    real, fake = torch.randn(32, 4) + 1, torch.randn(32, 4)
    between = ((real + fake) / 2).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    length = slope.square().sum(1).sqrt()  # bad
    gap = critic(fake).mean() - critic(real).mean()
    opt.zero_grad()
    (gap + 10 * (length - 1).square().mean()).backward()
    opt.step()
