# kind: 7
# form: error
# expect: error
import torch
from torch import nn

torch.manual_seed(0)
first, second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 2))


def project(x):
    hidden = torch.mm(x, first)
    return torch.mm(x, first.detach()[:, :2]) + torch.mm(hidden, second)


opt = torch.optim.SGD([first, second], lr=0.1)
for i in range(3):
    x = torch.randn(4, 8).bfloat16()
    loss = project(x).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
