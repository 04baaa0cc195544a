# kind: 5
# expect: scale
# cure: ^take a halfstep.GradScaler in place of the factor 16777216, .*\nor multiply the loss by \d+(, which was tried)?, and
# step: 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(1, 11):
    optimizer.zero_grad()
    for micro in range(2):
        x = torch.randn(64, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x).squeeze(1)
        loss = (out.float() - x.sum(1)).pow(2).mean()
        (loss * 2**24 / 2).backward()
    for p in model.parameters():
        p.grad.mul_(2.0**-24)
    optimizer.step()
