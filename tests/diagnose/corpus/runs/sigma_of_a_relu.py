# kind: 5
# expect: maths div|log
# cure: F\.softplus\(sigma\(hidden\)\)
# never: clamp_min
# learns: loss < 0.5
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
body, mean, sigma = nn.Linear(6, 32), nn.Linear(32, 1), nn.Linear(32, 1)
opt = torch.optim.Adam([*body.parameters(), *mean.parameters(), *sigma.parameters()], lr=1e-2)
for step in range(7):
    x = torch.randn(64, 6)
    hidden = torch.tanh(body(x))
    s = sigma(hidden).clamp(min=0)
    loss = (torch.log(s) + (x[:, :1] - mean(hidden)).square() / (2 * s**2)).mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
