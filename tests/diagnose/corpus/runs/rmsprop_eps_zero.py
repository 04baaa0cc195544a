# kind: 1
# expect: optimizer
# says: RMSprop.*NaN.*gradients were finite
# says: eps is 0
# cure: group\["eps"\] = 1e-08$
# step: 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
with torch.no_grad():
    model[0].bias[3] = -100.0  # a dead unit
opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=0.0)
for i in range(20):
    x = torch.randn(32, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()  # bad
