# kind: 2, in the closure of the first of two optimizers; it steps in the trial, too
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
for batch in range(4):
    x = torch.randn(16, 8)
    y = x.sum(1, keepdim=True).clamp(-3, 3)
    if batch == 3:
        x[0] *= 5e5

    def loss_of_first() -> torch.Tensor:
        of_first.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = first(x)  # bad
        loss = (out.float() - y).pow(2).mean()
        loss.backward()
        return loss

    def loss_of_second() -> torch.Tensor:
        of_second.zero_grad()
        loss = (second(x.clamp(-3, 3)) - y).pow(2).mean()
        loss.backward()
        return loss

    of_first.step(loss_of_first)
    of_second.step(loss_of_second)
