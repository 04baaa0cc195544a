# kind: 1
# expect: optimizer sqrt_
# cure: group\["centered"\] = False
# says: which rounding took below 0
import torch
from torch import nn

torch.manual_seed(0)
costs = torch.rand(64)
prices = nn.Parameter(torch.zeros(64))
opt = torch.optim.RMSprop([prices], lr=1e-3, alpha=0.9, centered=True)
for _ in range(300):
    loss = (costs * prices).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()  # bad
