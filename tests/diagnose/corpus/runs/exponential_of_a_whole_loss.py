# kind: 5
# expect: maths exp
# step: 88
# cure: clamp_max\((10\.0|22|79)\)
# never: stays at 7\.389
# learns: 0 < losses[-1] < 1.5 < 8 < losses[0] and all(x < 1e9 for x in losses)
import torch
from torch import nn

torch.manual_seed(3)
x = torch.randn(400, 8)
y = x @ torch.randn(8) * 0.6
x[200] *= 80  # a row in another unit
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for step in range(94):
    rows = torch.arange(16) + 16 * (step % 25)
    error = model(x[rows]).squeeze(1) - y[rows]
    risk = torch.exp(error.square().mean())  # bad
    opt.zero_grad()
    risk.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    losses.append(risk.item())
