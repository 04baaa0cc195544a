# kind: a ratio of probabilities, which are 0 in float16: a clamp of the old one changes most ratios
# expect: maths div
# cure: ^ratio = \(new \+ 0\.0001\) / \(old \+ 0\.0001\)
# learns: score() > 0.02
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16))
policy[2].weight.data.mul_(30)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
states, actions, bad_step = torch.randn(512, 4), torch.randint(0, 16, (512, 1)), 1
gains = (actions % 2).float() * 2 - 1


def score():
    return (torch.softmax(policy(states), -1).gather(1, actions) * gains).mean().item()


for step in range(150):
    if step % 10 == 0:
        old_of_all = torch.softmax(policy(states), -1).half().gather(1, actions).detach()
    rows = torch.randint(0, 512, (64,))
    old = old_of_all[rows]
    new = torch.softmax(policy(states[rows]), -1).half().gather(1, actions[rows])
    ratio = new / old  # bad
    loss = -torch.min(ratio * gains[rows], ratio.clamp(0.8, 1.2) * gains[rows]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
