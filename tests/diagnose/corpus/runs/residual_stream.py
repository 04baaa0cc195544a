# kind: 2
# expect: growth
# says: fell from .* step \d+ to .* step \d+
# never: needs a wider dtype
import torch
from torch import nn

torch.manual_seed(0)
blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
head = nn.Linear(16, 1)
opt = torch.optim.Adam([*blocks.parameters(), *head.parameters()], lr=0.02)
for i in range(400):
    x = torch.randn(32, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        for block in blocks:
            x = x + torch.relu(block(x))
        loss = -head(x).float().mean()  # the sign is wrong: it rewards large activations
    opt.zero_grad()
    loss.backward()
    opt.step()
    if not torch.isfinite(loss):
        break
