# kind: an operand that is read at more than one place is edited where it is made
# expect: maths log
# cure: softplus\(out\[:, 1\]\)
# learns: error < 0.3
import torch
from torch import nn

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2))
nn.init.constant_(net[2].bias, 1.0)
opt = torch.optim.Adam(net.parameters(), 5e-3)
for _ in range(81):
    x = torch.randn(64, 3)
    y = x.sum(1) + 0.1 * torch.randn(64)
    out = net(x)
    mean, var = out[:, 0], out[:, 1]
    loss = 0.5 * (torch.log(var) + (y - mean) ** 2 / var).mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
    error = (y - mean).abs().mean().item()
