# kind: 2
# expect: growth
# cure: ^the learning rate of SGD is -\S+: change the loop to end at 0: below 0, each step raises
# cure: \.py:14: opt\.param_groups\[0\]\["lr"\] -= 0\.01
# never: lower the learning rate
import torch
from torch import nn

torch.manual_seed(5)
w = torch.randn(10, 1)
net = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(55):
    opt.param_groups[0]["lr"] -= 0.01
    x = torch.randn(32, 10)
    loss = (net(x) - x @ w).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
