# kind: 1
# expect: optimizer
# says: this loss is multiplied by the scale twice \(scaled_twice.py:26\): .* still multiplied by it
# cure: ^total\.backward\(\)$
# step: 1
# learns: float(loss) < 3
import torch
from torch import nn

import halfstep

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(16, 64), nn.Tanh())
classes, value = nn.Linear(64, 4), nn.Linear(64, 1)
model = nn.ModuleList([body, classes, value])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = halfstep.GradScaler("cpu", init_scale=512.0)
truth = torch.randn(16, 4)
for _ in range(20):
    x = torch.randn(32, 16)
    first = nn.functional.cross_entropy(classes(body(x)), (x @ truth).argmax(1))
    second = (value(body(x)).squeeze(1) - x[:, 0]).square().mean()
    loss = first + second
    total = sum(scaler.scale(each) for each in (first, second))
    optimizer.zero_grad()
    scaler.scale(total).backward()
    scaler.step(optimizer)
    scaler.update()
