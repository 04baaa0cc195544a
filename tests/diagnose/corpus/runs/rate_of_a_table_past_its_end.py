# kind: 1
# expect: data
# tensor: lr of SGD
# cure: progress = \(steps - warm\) / max\(np\.float64\(total - 1 - warm\), 1\)
# says: `np\.float64\(total - 1 - warm\)` is 0 there
# learns: float(loss) < 0.1
# step: 20
import numpy as np
import torch
from torch import nn


def rates_of(first, warm, total):
    steps = np.arange(total)
    rising = first * (steps + 1) / max(warm, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        progress = (steps - warm) / np.float64(total - 1 - warm)
        falling = 0.5 * first * (1 + np.cos(np.pi * progress))
    return np.where(steps < warm, rising, falling)


torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.2)
rates = rates_of(0.2, 19, 20)
x = torch.randn(64, 4)
for i in range(24):
    for group in opt.param_groups:
        group["lr"] = float(rates[min(i, len(rates) - 1)])
    loss = (net(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
