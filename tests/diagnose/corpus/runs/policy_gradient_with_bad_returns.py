# kind: 2
# expect: maths div
# never: grew from
# learns: loss.isfinite().item()
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
for i in range(60):
    length = 1 if i == 20 else 8
    x = torch.randn(length, 4)
    dist = torch.distributions.Categorical(logits=policy(x))
    action = dist.sample()
    returns = torch.ones(length).cumsum(0).flip(0)
    advantage = (returns - returns.mean()) / returns.std(correction=0)  # bad
    loss = -(dist.log_prob(action) * advantage).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
