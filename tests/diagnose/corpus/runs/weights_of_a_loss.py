# kind: what a loss is given besides a batch, a weight for each class, is bad
# expect: data
# tensor: \bweight\b
# cure: ^look where weight .* it was not finite in column 2 of 4 \(from 0\)$
# never: keep =|this batch
# step: 1
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
with np.errstate(divide="ignore"):
    weight = torch.from_numpy(1 / np.array([30, 20, 0, 10], dtype="float32"))
model = nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(3):
    x = torch.randn(12, 6)
    y = torch.tensor([0, 1, 3]).repeat(4)
    loss = nn.functional.cross_entropy(model(x), y, weight=weight, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
