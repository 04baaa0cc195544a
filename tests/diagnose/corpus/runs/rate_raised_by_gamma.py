# kind: 2
# expect: growth
# says: raised from 0\.05
# cure: ^ExponentialLR raised the learning rate of SGD from 0\.05 .*: give it a gamma of at most 1
# cure: \.py:14: scheduler = torch.optim.lr_scheduler.ExponentialLR\(optimizer, gamma=1\.1\)
# says: learning rate of \S+ to \S+, raised
# never: lower the learning rate
import torch
from torch import nn

torch.manual_seed(4)
model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1.1)
for i in range(1, 101):
    x = torch.randn(64, 8)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
