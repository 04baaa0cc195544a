# kind: 2
# expect: growth
# says: the run diverges: \S*var\S* grew from \S+ when step 1 ended to inf or NaN in step \d+
# cure: ^stop the growth of \S*var\S*; .* It grows 30-fold a step .*: var\.mul_\(30\.0\)
import torch
from torch import nn

torch.manual_seed(1)
model = nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
var = torch.ones(6)
for _ in range(30):
    x = torch.randn(32, 6)
    out = model(x)
    var.mul_(30.0).add_(out.detach().square().mean(0))
    loss = (out / var.sqrt() - x).square().mean() + (var / (var * var).mean().sqrt()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
