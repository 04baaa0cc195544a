# kind: 2, an objective that falls since episodes get longer, before one row overflows a cast
# expect: range linear
# step: 5
# cure: linear@0:fp32
# never: the loss (fell|grew) from
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for step, length in enumerate([30, 100, 350, 1200, 4000], start=1):
    x = torch.randn(64, 8)
    returns = length * (1 + 0.1 * torch.rand(64, 4))
    if step == 5:
        x[0] *= 5e5
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        logits = policy(x)  # bad
    loss = -(logits.float().softmax(1) * returns).sum(1).mean()
    loss.backward()
    optimizer.step()
