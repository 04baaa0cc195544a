# kind: 2
# expect: growth
# cure: ^the loop raised the learning rate of Adam from 0\.01 to \S+: let it end at a lower rate
# cure: \.py:14: group\["lr"\] \*= 1\.12
# never: checkpoint
import torch
from torch import nn

torch.manual_seed(0)


def adjust(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 1.12


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for i in range(1, 301):
    x = torch.randn(64, 8)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    adjust(optimizer)
