# kind: 2, within three steps: a rule for the op that overflows first delays it by a step or two
# expect: growth
# says: the loss fell from .* until div overflowed float16; with a wider dtype it falls on to -
# cure: ^bound the loss from below; a wider dtype only delays .* log_sigma\.clamp_min
# never: not enough
import torch
from torch import nn
from torch.distributions import Normal

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(4, 64), nn.ReLU())
mean_of, log_sigma_of = nn.Linear(64, 2), nn.Linear(64, 2)
parts = nn.ModuleList([body, mean_of, log_sigma_of])
optimizer = torch.optim.Adam(parts.parameters(), lr=1e-1)
for _ in range(8):
    states = torch.randn(64, 4)
    with torch.autocast("cpu", torch.float16):
        hidden = body(states)
        mean, sigma = mean_of(hidden), log_sigma_of(hidden).exp()
        loss = -Normal(mean, sigma).log_prob(mean.detach()).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
