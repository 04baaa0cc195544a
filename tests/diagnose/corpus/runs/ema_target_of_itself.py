# kind: 2
# expect: growth
# says: grew from .* step \d+ to .* step \d+
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 6)
opt = torch.optim.SGD(model.parameters(), lr=0.2)
target = torch.randn(6)
for i in range(1000):
    x = torch.randn(32, 6)
    out = model(x).mean(0)
    loss = (out - target).square().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    target = 1.2 * target + 0.1 * out.detach()
    if not torch.isfinite(loss):
        break
