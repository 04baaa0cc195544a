# kind: 5
# expect: maths div|true_divide|abs|sub
# says: it makes the quotient 0 in 1 of 16 places: row 4 of 16 \(from 0\)
# cure: / y\.masked_fill\(y == 0, float\("inf"\)\)
# learns: 0 < loss < 2
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(30):
    x = torch.randn(16, 6)
    y = x[:, 0].abs() + 0.5
    if i == 7:
        y[4] = 0.0
    error = (model(x).squeeze(1) - y).abs() / y  # bad
    loss = error.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
