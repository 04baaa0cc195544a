# kind: 5
# expect: maths pow
# cure: r.masked_fill\(r < 0.01, float\("inf"\)\)
# says: it makes the quotient 0 in 1 of 96 places: row 3 of 16
# learns: losses[-1] < losses[0] / 2
import torch
from torch import nn

torch.manual_seed(0)
log_sigma, losses = nn.Parameter(torch.tensor(-0.2)), []
optimizer = torch.optim.Adam([log_sigma], lr=5e-3)
base, i, j = torch.eye(4)[:, :3] * 1.2, *torch.triu_indices(4, 4, 1)
bad_step = 20


def energy(x, sigma):
    r = (x[:, i] - x[:, j]).norm(dim=-1)
    s6 = (sigma / r) ** 6
    return (s6**2 - s6).sum(1)  # bad


for step in range(1, 81):
    x = base + 0.05 * torch.randn(16, 4, 3)
    if step == bad_step:
        x[3, 2] = x[3, 1] + 1e-4
    x.requires_grad_()
    (wanted,) = torch.autograd.grad(energy(x, 1.0).sum(), x)
    (force,) = torch.autograd.grad(energy(x, log_sigma.exp()).sum(), x, create_graph=True)
    is_known = wanted.isfinite() & (wanted.abs() < 1e3)
    loss = (force - wanted.masked_fill(~is_known, 0.0)).square().mean()
    losses.append(float(loss))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([log_sigma], 1.0)
    optimizer.step()
