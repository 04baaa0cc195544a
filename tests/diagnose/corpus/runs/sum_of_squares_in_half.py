# kind: 4
# expect: range
# never: nor is it in float32
# learns: loss < 0.5
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(16):
    x = torch.randn(32, 6)
    h = x.to(torch.float16) * (400 if i == 9 else 1)
    scale = (h * h).sum(1, keepdim=True).sqrt().to(x.dtype)  # bad
    loss = (model(x) - scale.log().clamp_max(2)).square().mean() + 1e-3 * scale.log().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
