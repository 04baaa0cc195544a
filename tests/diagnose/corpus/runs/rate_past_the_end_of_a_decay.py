# kind: 2
# expect: growth
# cure: return max\(\(1 - done\) \* 2\.0, 0\.0\)
# says: multiplies it by poly\(\d+\), which is -.* at 0 none is taken\. It fell below 0 in step 11 of \d+
import torch
from torch import nn

TOTAL = 10


def poly(i):
    done = i / TOTAL
    return (1 - done) * 2.0


torch.manual_seed(8)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, poly)
x = torch.randn(256, 6)
y = x.square().sum(1, keepdim=True)
for _ in range(32):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
