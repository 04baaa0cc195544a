# kind: 1
# expect: optimizer
# says: still multiplied by the scale
# cure: scaler\.step\(
# never: in the forward pass|in the backward pass|was not finite
# step: 1
import torch
from torch import nn
from torch.nn.functional import softplus

import halfstep

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
of_generator = torch.optim.SGD(generator.parameters(), lr=1e-2)
of_critic = torch.optim.SGD(critic.parameters(), lr=1e-2)
scaler = halfstep.GradScaler("cpu", on_skips=lambda report: None)
for i in range(7):
    real, noise = torch.randn(32, 8), torch.randn(32, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = generator(noise)
        loss = (softplus(-critic(real)) + softplus(critic(fake.detach()))).float().mean()
    of_critic.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(of_critic)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = softplus(-critic(fake)).float().mean()
    of_generator.zero_grad()
    scaler.scale(loss).backward()
    of_generator.step()
    scaler.update()
