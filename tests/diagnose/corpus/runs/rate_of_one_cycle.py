# kind: 2
# expect: growth
# cure: ^OneCycleLR raised .*: give it a lower max_lr\n.*max_lr=8\.0
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8.0, total_steps=300)
for i in range(1, 61):
    x = torch.randn(64, 8)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    cycle.step()
