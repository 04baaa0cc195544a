# kind: 2
# expect: range mul
# says: tried for \d+ steps of Adam on this batch
# never: 2 Adam optimizers
# step: 4
import torch
from torch import nn
from torch.nn.functional import softplus

torch.manual_seed(0)
maker, critic = nn.Linear(4, 2), nn.Linear(2, 1)
of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
for i in range(1, 6):
    real, noise = torch.randn(16, 2) + 1, torch.randn(16, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        of_real, of_fake = critic(real), critic(maker(noise).detach())
        loss = softplus(-of_real).mean() + softplus(of_fake).mean()
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    with torch.autocast("cpu", dtype=torch.float16):
        size = 3e5 if i == 4 else 1.0
        judged = critic(maker(noise)) * size  # bad
    loss_of_maker = softplus(-judged.float() / size).mean()
    of_maker.zero_grad()
    loss_of_maker.backward()  # the critic gets gradients too, which nobody steps
    of_maker.step()
