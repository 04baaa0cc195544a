# kind: 5
# expect: maths log
# cure: h = F\.softplus\(first\(x\)\)
# learns: loss < 1.0
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
first, last = nn.Linear(6, 32), nn.Linear(32, 1)
opt = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=1e-2)
for step in range(21):
    x = torch.randn(64, 6)
    h = F.relu(first(x))
    out = last(torch.log(h))  # bad
    loss = F.mse_loss(out.squeeze(1), x.sum(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
