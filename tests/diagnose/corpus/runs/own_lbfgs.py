# kind: 1
# expect: maths reciprocal|div|rdiv
# step: 6
# says: what the loop wrote to weight comes from it
# cure: rho = 1 / \(change @ move\)\.clamp_min\(1e-06\)
import torch
from torch import nn

torch.manual_seed(1)
x = torch.randn(80, 6)
y = x @ torch.randn(6, 1) + 1
model = nn.Linear(6, 1)
losses, known, rates = [], [], [0.2, 0.2, 0.2, 0.0] + [0.2] * 20


def gradient():
    model.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    losses.append(loss.item())
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def write(values):
    with torch.no_grad():
        first, second = values[:6], values[6:]
        model.weight.copy_(first.view_as(model.weight))
        model.bias.copy_(second.view_as(model.bias))


point, slope = torch.cat([p.detach().flatten() for p in model.parameters()]), gradient()
for rate in rates:
    direction = slope.clone()
    for move, change in known[-1:]:
        rho = 1 / (change @ move)  # bad
        direction = direction - rho * (move @ slope) * change / (change @ change) * rho.sign()
    after = point - rate * direction
    write(after)
    now = gradient()
    known.append((after - point, now - slope))
    point, slope = after, now
