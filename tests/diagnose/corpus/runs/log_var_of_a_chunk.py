# kind: an operand that is read at more than one place is edited where it is made
# expect: maths exp
# cure: standardise
import torch
from torch import nn

torch.manual_seed(3)
encoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 8))
opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)
scale = torch.tensor([1.0, 1.0, 1000.0, 5.0, 2.0, 1.0, 1.0, 300.0])
for _ in range(7):
    x = torch.randn(64, 8) * scale
    mu, log_var = encoder(x).chunk(2, dim=-1)
    z = mu + torch.randn_like(mu) * torch.exp(log_var / 2)  # bad
    divergence = -0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(1).mean()
    loss = nn.functional.mse_loss(decoder(z), x) + 1e-3 * divergence
    opt.zero_grad()
    loss.backward()
    opt.step()
