# kind: 6
# expect: maths log
# cure: clamp_min
# step: 1
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(2, 1)
opt, x = torch.optim.SGD(net.parameters(), 0.1), torch.randn(16, 2)
for _ in range(3):
    one, two = net(x).mean(), net(x).square().mean()
    slopes = [torch.autograd.grad(each, net.weight, retain_graph=True)[0] for each in (one, two)]
    weight = slopes[0].norm() / (slopes[0].norm() + slopes[1].norm())
    loss = two + weight * torch.log(torch.relu(-net(x) - 3)).mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
