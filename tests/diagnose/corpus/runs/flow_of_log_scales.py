# kind: the square of a number overflows that layers of exp have made large
# expect: maths mul|pow
# cure: log_scale = 2 \* torch\.tanh\(log_scale / 2\)
# never: clamp\(-10000
# learns: losses[-1] < losses[0]
import torch
from torch import nn

torch.manual_seed(7)
nets = nn.ModuleList(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(4))
optimizer, losses = torch.optim.Adam(nets.parameters(), lr=3e-3), []
for step in range(15):
    x = torch.randn(128, 4)
    if step == 8:
        x[3] = 900.0
    log_det = 0.0
    for net in nets:
        kept, moved = x.chunk(2, 1)
        log_scale, shift = net(kept).chunk(2, 1)
        x = torch.cat([moved * torch.exp(log_scale) + shift, kept], 1)  # bad
        log_det = log_det + log_scale.sum(1)
    loss = (0.5 * x.square().sum(1) - log_det).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(nets.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
