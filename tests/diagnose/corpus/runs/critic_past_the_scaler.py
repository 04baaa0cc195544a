# kind: 1
# expect: optimizer
# says: still multiplied by the scale
# never: was not finite before the step
# step: 1
import torch
from torch import nn

import halfstep

torch.manual_seed(0)
actor, critic = nn.Linear(6, 2), nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
opt_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
opt_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
scaler = halfstep.GradScaler("cpu", on_skips=lambda report: None)
for i in range(12):
    state = torch.randn(32, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        value = critic(actor(state).detach()).float()
        loss = (value - state[:, :1]).square().mean()
    opt_critic.zero_grad()
    scaler.scale(loss).backward()
    opt_critic.step()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = -critic(actor(state)).float().mean()
    opt_actor.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt_actor)
    scaler.update()
