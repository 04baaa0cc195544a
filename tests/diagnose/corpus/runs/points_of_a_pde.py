# kind: 5
# expect: maths div|reciprocal
# says: it makes the quotient 0 in 1 of 12 places: row 0 of 12
# cure: / r\.masked_fill\(r == 0, float\("inf"\)\)
# never: A critic|rises
# learns: losses[-1] < 0.6 * losses[0]
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for i in range(16):
    points = torch.rand(12, 1) * 0.9 + 0.1
    if i == 9:
        points[0] = 0.0
    r = points.clone().requires_grad_(True)
    u = model(r)
    (u_r,) = torch.autograd.grad(u.sum(), r, create_graph=True)
    (u_rr,) = torch.autograd.grad(u_r.sum(), r, create_graph=True)
    error = u_rr + 2 * u_r / r + 6.0  # bad
    loss = error.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
