# kind: 7
# expect: maths div
# says: 1\.scaled\.size float32\[1\]: 0 to 0
# never: load a checkpoint
# step: 1
import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.size, self.is_set = nn.Parameter(torch.ones(1)), False

    def forward(self, x):
        if not self.is_set:
            self.size.data.copy_(x.detach().abs().mean())
            self.is_set = True
        return x / self.size  # bad


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.scaled = nn.Linear(8, 8), Scaled()
        nn.init.zeros_(self.lift.weight)
        nn.init.zeros_(self.lift.bias)

    def forward(self, x):
        return x + self.scaled(torch.relu(self.lift(x)))


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(4):
    loss = (net(torch.randn(16, 4)) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
