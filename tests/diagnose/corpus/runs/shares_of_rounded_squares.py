# kind: 2, while a loss falls without bound: squares that are rounded to 0, no overflow
# expect: range div
# step: 3
# cure: mul:fp32
# never: the loss (fell|grew) from
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-1)
for step in (1, 2, 3):
    x = torch.randn(64, 8) + 1
    if step == 3:
        x[:8] = x[:8] * 1e-5
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        h = nn.functional.linear(x, torch.eye(8))
        squares = h * h
        shares = squares / squares.sum(1, keepdim=True)  # bad
        loss = -net(shares * 8).mean()
    loss.backward()
    optimizer.step()
