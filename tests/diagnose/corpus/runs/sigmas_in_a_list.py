# kind: a parameter in a list that a step took below 0 has the name of the list
# expect: maths log
# cure: train the logarithm of spreads, a parameter
# never: logarithm of k
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 3)
targets = [x.sum(1), x[:, 0] * 2]
heads = nn.ModuleList([nn.Linear(3, 1) for _ in targets])
spreads = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in targets])
opt = torch.optim.SGD([*heads.parameters(), *spreads], lr=0.3)
for _ in range(20):
    loss = 0.0
    for k, target in enumerate(targets):
        error = (heads[k](x).squeeze(1) - target).square().mean()
        loss = loss + error / (2 * spreads[k] ** 2 + 0.2) + torch.log(spreads[k])  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
