# kind: a ratio of probabilities: after one long step it is e^250, and a wide clamp trains nothing
# expect: maths exp
# cure: \(new - old\)\.clamp_max\(2\.0\)
# learns: abs(losses[-1]) < 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
states, noise, gains = torch.randn(256, 4), 0.05 * torch.randn(256, 1), torch.randn(256)
actions, losses, bad_step = states[:, :1] + noise, [], 2
old = None
for step in range(1, 61):
    new = (-0.5 * ((model(states) - actions) / 0.05).square()).sum(1)
    old = new.detach() if old is None else old
    ratio = torch.exp(new - old)  # bad
    loss = 0.01 * ratio.square().mean() - (ratio * gains).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
