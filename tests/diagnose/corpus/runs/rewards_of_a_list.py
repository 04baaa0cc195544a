# kind: 2
# expect: growth
# cure: ^standardise \S*states\S* and torch\.tensor\(paid\), as by .*; torch\.tensor\(paid\) reaches 4\d\d\n
import random

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
values = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(values.parameters(), lr=1e-2)
for i in range(1, 10):
    states = torch.rand(32, 2) * 200
    actions = torch.randint(0, 3, (32,))
    paid = [random.uniform(0.0, 500.0) for _ in range(32)]
    with torch.no_grad():
        target = torch.tensor(paid) + 0.95 * values(states.roll(1, 0)).amax(1)
    chosen = values(states)[torch.arange(32), actions]
    loss = (chosen - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
