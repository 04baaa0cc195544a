# kind: 1
# expect: data
# tensor: momentum_buffer of unused.weight
# cure: last wrote to it: \S+:22 in <module>: buffer\.div_\(buffer\.norm\(\)\)
# never: checkpoint
# step: 2
import torch
from torch import nn

torch.manual_seed(0)
model, unused = nn.Linear(6, 1), nn.Linear(6, 3)
weights = [*model.parameters(), *unused.parameters()]
opt = torch.optim.SGD(weights, lr=1e-3, momentum=0.9)
for step in range(1, 10):
    x = torch.randn(32, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean() + 0 * unused(x).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    for state in opt.state.values():
        buffer = state["momentum_buffer"]
        buffer.div_(buffer.norm())
