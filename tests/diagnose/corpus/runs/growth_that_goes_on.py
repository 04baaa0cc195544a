# kind: 2
# expect: growth
# says: grew from .* in step \d+ to .* in step \d+
# cure: a clamp only delays it
# never: clamp_max
import torch
from torch import nn

torch.manual_seed(0)
head = nn.Linear(8, 1)
optimizer = torch.optim.SGD(head.parameters(), lr=1e-45)
memory = torch.ones(16, 8)
for i in range(1, 201):
    memory = 1.3 * memory + torch.rand(16, 8)
    out = head(memory)
    loss = (memory.square().mean(1) + torch.log(torch.exp(1e-18 * memory + out * 0).sum(1))).mean()
    if not torch.isfinite(loss):
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
