# kind: 5
# expect: maths mul
# says: net\.1\.mask comes from it|1\.mask comes from it
# never: check the batch first
# step: 1
import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        later = torch.ones(6, 6).triu(1)
        self.register_buffer("mask", later * -torch.inf)  # bad

    def forward(self, x):
        return torch.softmax(x @ x.transpose(1, 2) + self.mask, -1) @ x


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), Mixed(), nn.Linear(8, 1))
opt, x = torch.optim.SGD(net.parameters(), 0.1), torch.randn(16, 6, 4)
for _ in range(4):
    loss = (net(x) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
