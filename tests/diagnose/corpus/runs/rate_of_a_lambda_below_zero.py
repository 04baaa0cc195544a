# kind: 2
# expect: growth
# cure: lambda i: max\(1 - i / 8, 0\.0\)
# says: multiplies it by <lambda>\(\d+\), which is -.* It fell below 0 in step 9 of \d+
import torch
from torch import nn

torch.manual_seed(8)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / 8)
x = torch.randn(256, 6)
y = x.square().sum(1, keepdim=True)
for _ in range(60):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
