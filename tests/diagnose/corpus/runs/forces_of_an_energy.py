# kind: 4
# expect: maths pow
# step: 4
# says: tried for \d+ steps of SGD on this batch \(in turn with the one before\): the loss falls
# never: no weight of it
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1, 7):
    x = torch.rand(8, 3) + 1
    x[2, 0] = 1e-7 if step == 4 else 1.0
    energy = model(x.requires_grad_()).squeeze(1) + 1e-9 * x[:, 0] ** -12  # bad
    (force,) = torch.autograd.grad(-energy.sum(), x, create_graph=True)
    loss = (energy - 1).square().mean() + force.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
