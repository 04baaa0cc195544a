# kind: 6
# expect: data
# tensor: \by\b
# cure: keep = \S*\by\S*\.isfinite\(\)[^~]*it was not finite in 11 of 400 rows
# step: 1
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
table = np.random.default_rng(0).normal(size=(400, 6)).astype("float32")
table[::37, 5] = np.nan
x, y = torch.from_numpy(table).split([5, 1], 1)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for i in range(1, 31):
    pick = torch.randint(0, 400, (32,))
    loss = nn.functional.l1_loss(model(x[pick]), y[pick])
    if loss != loss:
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
