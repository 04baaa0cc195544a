# kind: 8
# expect: maths
# says: maths: `div` in the backward pass is not finite
# cure: grad\.norm\(\)\.clamp_min\(1e-06\)
# step: 4
import torch
from torch import nn

torch.manual_seed(5)
trunk, head = nn.Linear(8, 16), nn.Linear(16, 1)
optimizer = torch.optim.Adam([*trunk.parameters(), *head.parameters()], lr=1e-3)


def unit(grad):
    return grad / grad.norm()  # bad


for i in range(1, 9):
    x = torch.randn(32, 8)
    shared = trunk(x).clone()
    shared.register_hook(unit)
    loss = (head(shared) * float(i != 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
