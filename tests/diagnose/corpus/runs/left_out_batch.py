# kind: 6
# expect: data
# tensor: \bx\b
# step: 14
# never: the loss of step 14 was finite
# says: not finite in row 9 of 32 \(from 0\), column 2 of 6 \(from 0\)
# says: the script left this batch out
# never: leave this batch out
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(1, 30):
    x = torch.randn(32, 6)
    if i == 14:
        x[9, 2] = float("nan")
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    if torch.isnan(loss):
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
