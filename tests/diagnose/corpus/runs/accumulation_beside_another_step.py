# kind: 2, before the first step of one of two optimizers, while the other one steps
# expect: range linear
# step: 4
# says: tried for \d+ steps of SGD on this batch
# cure: linear@0:fp32
import torch
from torch import nn

torch.manual_seed(0)
first = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 1))
second = nn.Linear(8, 1)
of_first = torch.optim.SGD(first.parameters(), lr=0.01)
of_second = torch.optim.Adam(second.parameters(), lr=0.01)
for batch in range(1, 5):
    x = torch.randn(16, 8)
    y = x.sum(1, keepdim=True).clamp(-3, 3)
    if batch == 4:
        x[0] *= 5e5
    with torch.autocast("cpu", torch.float16):
        out = first(x)  # bad
    loss = (out.float() - y).pow(2).mean() / 8
    loss.backward()
    if batch % 8 == 0:
        of_first.step()
        of_first.zero_grad()
    of_second.zero_grad()
    (second(x.clamp(-3, 3)) - y).pow(2).mean().backward()
    of_second.step()
