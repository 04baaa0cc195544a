# kind: 2
# expect: growth
# cure: ^bound the loss .* A critic, .* p\.data\.clamp_\(-0\.1, 0\.1\)
# never: variance|lower the learning rate of
# says: grew from .* step \d+ to .* step \d+
import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(critic.parameters(), lr=0.05)
for i in range(31):
    real, fake = torch.randn(64, 2) + 2, torch.randn(64, 2)
    loss = critic(fake).mean() - critic(real).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
