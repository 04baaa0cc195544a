# kind: 2, after one step of a loss that falls without bound: squares that overflow
# expect: range mul
# step: 2
# cure: mul:fp32
# never: the loss (fell|grew) from
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-2)
for step in (1, 2):
    x = torch.randn(64, 8) + 1
    if step == 2:
        x[:8] = x[:8] * 300
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        h = nn.functional.linear(x, torch.eye(8))
        squares = h * h  # bad
        shares = squares / squares.sum(1, keepdim=True)
        loss = -net(shares * 8).mean()
    loss.backward()
    optimizer.step()
