# kind: 2
# expect: range mul|square|pow|mean|mse_loss|sub|linear|addmm
# never: grew from
# learns: loss < 0.1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 1)
opt = torch.optim.Adam(model.parameters(), lr=2e-2)
for i in range(150):
    x = torch.randn(32, 6)
    if i == 60:
        x[4] *= 3000
    with torch.autocast("cpu", dtype=torch.float16):
        error = model(x).squeeze(1) - x.half().sum(1)
        loss = (error * error).mean()  # bad
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
