# kind: 1
# expect: range
# cure: ^leave out row 4 of 30 \(from 0\), or check .*x.* reaches 1e\+30, and .* reached 2\.9
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 3)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
for step in range(4):
    x, y = torch.randn(30, 6), torch.arange(30) % 3
    if step == 2:
        x[4] = 1e30
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
