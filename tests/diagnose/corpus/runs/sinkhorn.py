# kind: 5
# expect: maths reciprocal
# cure: logarithms from line 13 on.*logsumexp
# says: finite, but no cure.*replaces \d+ of 120 divisors
# never: cure \(replayed
import torch

torch.manual_seed(0)
x = torch.nn.Parameter(torch.randn(40, 2) * 0.1)
target, bad_step = torch.randn(40, 2) * 0.5 + torch.tensor([3.0, 0.0]), 1
opt = torch.optim.Adam([x], lr=1e-2)
cost = torch.cdist(x, target) ** 2
k = torch.exp(-cost / 0.05)
v = torch.ones(40)
for _ in range(3):
    u = 1 / (k @ v)  # bad
    v = 1 / (k.T @ u)  # bad
(u[:, None] * k * v * cost).sum().backward()
opt.step()
