# kind: 2
# expect: growth
# cure: ^bound the loss from below: it fell to -\d.* in step \d+\. A likelihood
# never: critic
import torch
from torch import nn

torch.manual_seed(0)
net, log_sigma = nn.Linear(4, 1), nn.Parameter(torch.zeros(()))
w = torch.randn(4, 1)
optimizer = torch.optim.SGD([*net.parameters(), log_sigma], lr=0.05)
for i in range(1, 301):
    x = torch.randn(64, 4)
    residual = net(x) - x @ w  # without any noise
    loss = (residual / log_sigma.exp()).square().mean() / 2 + log_sigma
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
