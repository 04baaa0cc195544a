# kind: 1
# expect: optimizer
# cure: \(square \+ 1e-16\)\.rsqrt\(\)
# learns: loss.item() < 0.2 * first
# step: 1
import torch
from torch import nn


class ByRoot(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                square = state.setdefault("square", torch.zeros_like(p))
                square.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.sub_(group["lr"] * p.grad * square.rsqrt())


torch.manual_seed(0)
table = nn.Embedding(50, 8)
opt = ByRoot(table.parameters(), 0.02)
word = torch.randint(0, 30, (64,))
target, first = torch.randn(64, 8)[word % 8], None
for _ in range(120):
    loss = 1e-3 * (table(word) - target).square().mean()
    first = loss.item() if first is None else first
    opt.zero_grad()
    loss.backward()
    opt.step()
