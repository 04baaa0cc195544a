# kind: 1
# expect: data
# tensor: lr of SGD
# cure: return 0\.3 \* max\(1 - past / span, 0\.0\) \*\* 0\.9
# says: `1 - past / span` is -0\.\d+ there
# learns: float(loss) < 0.1
# step: 32
import torch
from torch import nn

WARM = 4


def rate_at(i, total=30):
    if i < WARM:
        return 0.3 * (i + 1) / WARM
    past, span = i - WARM, total - WARM
    return 0.3 * (1 - past / span) ** 0.9


torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.3)
x = torch.randn(64, 4)
for i in range(60):
    rate = rate_at(i)
    for group in opt.param_groups:
        group["lr"] = rate
    loss = (net(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    try:
        opt.step()
    except TypeError:  # a complex number
        break
