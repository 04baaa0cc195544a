# kind: 5
# expect: maths div
# step: 1
# cure: masked_fill\(\(.* == 0\).all\(-1, keepdim=True\), 10000.0\).norm
# learns: losses[-1] < losses[0] / 2
import torch
from torch import nn

torch.manual_seed(0)
charges, losses = nn.Embedding(2, 1), []
optimizer = torch.optim.Adam(charges.parameters(), lr=0.05)


def energy(q, x):
    difference = x.unsqueeze(1) - x.unsqueeze(2)
    d = difference.norm(dim=-1)
    return (q.unsqueeze(1) * q.unsqueeze(2) / d).sum((1, 2)) / 2  # bad


for _ in range(60):
    kinds = torch.arange(6).remainder(2).repeat(16, 1)
    x = (3 * torch.randn(16, 6, 3)).requires_grad_()
    e = energy(charges(kinds).squeeze(-1), x)
    (force,) = torch.autograd.grad(-e.sum(), x, create_graph=True)
    q, d = 1.0 - 2.0 * kinds, torch.cdist(x.detach(), x.detach()) + 1e9 * torch.eye(6)
    wanted = (q.unsqueeze(1) * q.unsqueeze(2) / d).sum((1, 2)) / 2
    loss = (e - wanted).square().mean() + 0.01 * force.square().mean()
    losses.append(float(loss))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
