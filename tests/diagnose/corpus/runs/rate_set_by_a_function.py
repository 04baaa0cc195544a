# kind: 1
# expect: data
# tensor: lr of AdamW
# cure: rate = first \* np\.sqrt\(max\(1 - epoch / last, 0\.0\)\)
# says: `1 - epoch / last` is -0\.05 there
# learns: float(loss) < 1
import numpy as np
import torch
from torch import nn


def adjust(groups, first, epoch, last):
    with np.errstate(invalid="ignore"):
        rate = first * np.sqrt(1 - epoch / last)
    for group in groups:
        group["lr"] = rate


torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.AdamW(net.parameters(), lr=0.3)
x, bad_step = torch.randn(64, 4), 21
for i in range(27):
    loss = (net(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    adjust(opt.param_groups, 0.3, i + 1, 20)
    opt.step()
