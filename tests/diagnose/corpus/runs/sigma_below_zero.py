# kind: 2
# expect: maths log
# says: not tried: bound the loss from below: it fell to -\d\S* in step \d+\. A likelihood .* softplus\(sigma\)
import torch
from torch import nn

torch.manual_seed(0)
net, sigma, w = nn.Linear(3, 1), nn.Parameter(torch.ones(())), torch.randn(3, 1)
opt = torch.optim.Adam([*net.parameters(), sigma], lr=2e-2)
for i in range(1, 180):
    x = torch.randn(64, 3)
    loss = ((net(x) - x @ w).square() / (2 * sigma**2) + torch.log(sigma)).mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
