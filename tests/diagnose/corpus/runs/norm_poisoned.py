# kind: 6
# expect: data
# tensor: \bx\b
# step: 6
# says: it has made 1\.running_mean and 1\.running_var inf or NaN
# never: went bad in step
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(1, 30):
    x = torch.randn(32, 6)
    if i == 6:
        x[9, 2] = float("nan")
    loss = (model(x).squeeze(1) - x.nan_to_num().sum(1)).square().mean()
    if torch.isnan(loss):
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i == 14:
        model.eval()
        frozen = model(torch.randn(32, 6)).square().mean()
        opt.zero_grad()
        frozen.backward()
        opt.step()
        model.train()
        break
