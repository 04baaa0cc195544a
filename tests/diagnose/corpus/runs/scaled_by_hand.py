# kind: 5
# expect: scale
# says: because the loss scale \(2\^22\) is too large
# cure: ^take a halfstep.GradScaler in place of the factor 4194304, .*\nor multiply the loss by \d+(, which was tried)?, and
# step: 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
SCALE = 2.0**22
for i in range(1, 11):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x).squeeze(1)
    loss = (out.float() - x.sum(1)).square().mean()
    optimizer.zero_grad()
    (loss * SCALE).backward()
    for p in model.parameters():
        p.grad /= SCALE
    optimizer.step()
