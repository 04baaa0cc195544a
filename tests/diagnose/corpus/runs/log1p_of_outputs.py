# kind: 5
# expect: maths log1p
# cure: log1p\((F\.softplus\(out\)|out\.clamp_min\(0\))\)
# never: sold\.clamp_min
# learns: sum(losses[-10:]) < 0.6 * sum(losses[:10])
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
nn.init.constant_(model[2].bias, 12.0)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for i in range(120):
    x = torch.randn(64, 6) * 3
    sold = torch.poisson(torch.exp(1 + 0.2 * x[:, :1]))
    out = model(x)
    loss = (torch.log1p(out) - torch.log1p(sold)).abs().mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
