# kind: 2
# expect: range pow
# never: diverges
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
total = torch.zeros(4)
for _ in range(80):
    x = torch.randn(8, 4)
    total = total + 4
    with torch.autocast("cpu", dtype=torch.float16):
        distance = (model(x) + total.half()) ** 2  # bad
        loss = distance.mean() / 65504
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
