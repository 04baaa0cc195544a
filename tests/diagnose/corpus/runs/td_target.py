# kind: 2
# expect: growth
# says: grew from .* in step \d+ to .* in step \d+
# never: needs a wider dtype
import copy
import torch
from torch import nn

torch.manual_seed(0)
q = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.Adam(q.parameters(), lr=3e-2)
states = torch.randn(256, 4)
for i in range(400):
    s, s2 = states[torch.randint(0, 256, (32,))], states[torch.randint(0, 256, (32,))]
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            target = 1.0 + 1.25 * q(s2).max(1).values
        loss = (q(s).max(1).values - target).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if not torch.isfinite(loss):
        break
