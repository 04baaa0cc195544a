# kind: 2
# expect: growth
# cure: lambda i: max\(1\.0 - i / 20, 0\.0\)
# says: the learning rate of SGD is -\S+: LambdaLR multiplies it by <lambda>\(
# never: lower the learning rate
# learns: loss < 1
import torch
from torch import nn

torch.manual_seed(5)
w = torch.randn(10, 1)
net = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.2)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1.0 - i / 20)
for i in range(68):
    x = torch.randn(32, 10)
    loss = (net(x) - x @ w / 4).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
