# kind: a probability is rounded to 1 by bfloat16, where a square root has no slope
# expect: range sqrt
# cure: torch\.sqrt\(\(1 - p\)\.clamp_min\(1e-0
# learns: losses[-1] < losses[0]
import torch
from torch import nn

torch.manual_seed(2)
model = nn.Linear(4, 1)
optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
for step in range(12):
    x = torch.randn(64, 4) * 3
    y = (x[:, 0] > 0).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = torch.sigmoid(model(x).squeeze(1))
        loss = (y * torch.sqrt(1 - p) + (1 - y) * p).mean()  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
