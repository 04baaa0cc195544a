# kind: 2
# expect: growth mean
# says: grew from .* in step \d+ to .* in step \d+
# never: clamp\(
import torch
from torch import nn

torch.manual_seed(0)
head = nn.Linear(8, 64)
opt = torch.optim.SGD(head.parameters(), lr=1e-45)
memory = torch.ones(64, 8)
for i in range(76):
    memory = 1.8 * memory
    loss = (head(memory) ** 2).mean()  # bad
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(head.parameters(), 0.5)
    opt.step()
