# kind: 2, within three steps: a KL divergence with the wrong sign
# expect: growth
# step: 3
# says: the loss fell from .* until exp overflowed float16; with a wider dtype it falls on to -
# cure: ^bound the loss from below; a wider dtype only delays .* a KL divergence is at least 0
# never: dtype=torch.bfloat16
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 20))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-1)
for _ in range(6):
    x = torch.rand(64, 20)
    with torch.autocast("cpu", torch.float16):
        mean, log_var = encoder(x).chunk(2, 1)
        again = decoder(mean + torch.randn_like(mean) * torch.exp(0.5 * log_var))
        kl = 0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp(), 1).mean()
        loss = F.mse_loss(again, x) + kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
