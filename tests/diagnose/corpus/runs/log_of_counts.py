# kind: 5
# expect: maths log
# cure: torch\.log1p\(counts\)
# learns: loss < 0.1
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(150):
    counts = torch.poisson(torch.full((64, 4), 6.0 if step < 10 else 3.0))
    x = counts.log()  # bad
    loss = F.mse_loss(model(x), counts.sum(1, keepdim=True) / 10)
    opt.zero_grad()
    loss.backward()
    opt.step()
