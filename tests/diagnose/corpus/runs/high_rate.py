# kind: 2
# expect: growth
# says: lr|learning rate
# cure: learning rate
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=1.2)
for i in range(300):
    x = torch.randn(32, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if not torch.isfinite(loss):
        break
