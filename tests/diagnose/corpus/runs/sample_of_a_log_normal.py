# kind: an exp inside of torch.distributions overflows
# expect: maths exp
# cure: clamp_max
# never: clamp_min
# learns: losses[-1] < losses[8]
import torch
from torch import nn
from torch.distributions import LogNormal

torch.manual_seed(4)
model = nn.Linear(4, 1)
optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
for step in range(60):
    x = torch.randn(32, 4)
    if step == 8:
        x[5] = 90 * model.weight[0].detach().sign()
    loc = model(x) * 2
    demand = LogNormal(loc, 0.1).rsample()  # bad
    loss = nn.functional.smooth_l1_loss(demand, x[:, :1].exp().clamp_max(9))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
