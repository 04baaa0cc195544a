"""Training in float16 of which one step has values that are too large, in ``net.up``."""

import sys

import torch
from torch import nn

BAD, NUM_STEPS = 4, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        nn.init.eye_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = self.up(x)
        return self.head(large / 1000)


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled="unscaled" not in sys.argv)
for step in range(1, NUM_STEPS + 1):
    x = torch.full((2, 8), 60000.0 if step == BAD else 1.0)
    with torch.no_grad():
        net.up.bias.fill_(10000.0 if step == BAD else 0.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = net(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(net.head.weight.sum().item())
