# kind: 5
# expect: maths sqrt
# says: of Adam on this batch.*: the loss falls from \d
# learns: losses[-1] < losses[0]
# says: replayed at scale 1; that of the step is 2\^8
# step: 1
import torch
from torch import nn

import halfstep

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1))
nn.init.zeros_(net[-1].weight)
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = halfstep.GradScaler("cpu", init_scale=256.0, on_skips=lambda report: None)
losses = []
for i in range(1, 8):
    x = torch.randn(32, 4, requires_grad=True)
    inner = scaler.scale(net(x).sum() - 50)
    slope = torch.autograd.grad(inner, x, create_graph=True)[0] / scaler.get_scale()
    length = slope.pow(2).sum(1).sqrt()  # bad
    loss = (net(x).sum(1) - x.detach().sum(1)).square().mean() + 0.1 * (length - 1).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
