# Its optimizer has a guard. Of two warnings, one is of another version.
import warnings

import torch
from torch import nn

warnings.warn("this will go", FutureWarning)
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    x = torch.full((8, 4), float("nan")) if step % 10 == 3 else torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), torch.ones(8)).backward()
    if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        optimizer.step()
