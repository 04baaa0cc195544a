# kind: an operand that is read at more than one place is edited where it is made
# expect: maths log
# cure: softplus\(sigma_head\(h\)
# learns: error < 0.3
import torch
from torch import nn

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
mu_head, sigma_head = nn.Linear(32, 1), nn.Linear(32, 1)
nn.init.constant_(sigma_head.bias, 1.0)
opt = torch.optim.Adam([*body.parameters(), *mu_head.parameters(), *sigma_head.parameters()], 5e-3)
w = torch.randn(4)
for _ in range(55):
    x = torch.randn(64, 4)
    y = x @ w + 0.05 * torch.randn(64)
    h = body(x)
    mu, sigma = mu_head(h).squeeze(1), sigma_head(h).squeeze(1)
    loss = ((y - mu) ** 2 / (2 * sigma**2) + torch.log(sigma)).mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
    error = (y - mu).abs().mean().item()
