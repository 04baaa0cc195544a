# kind: 2
# expect: growth
# says: grew from .* in step \d+ to .* in step \d+
# never: needs a wider dtype
import torch
from torch import nn

torch.manual_seed(0)
cell, head = nn.Linear(8, 8), nn.Linear(8, 1)
opt = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=1e-9)
memory = torch.zeros(16, 8)
for i in range(200):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        memory = 1.1 * memory.detach() + cell(x)
        loss = head(memory).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if not torch.isfinite(loss):
        break
