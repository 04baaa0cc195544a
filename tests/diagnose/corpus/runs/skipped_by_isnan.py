# kind: 6
# expect: maths log
# step: 9
# says: it has made 1.running_mean and 1.running_var inf or NaN
# never: the loss of step
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(1, 20):
    x = torch.rand(32, 6)
    if i == 9:
        x[3, 1] = 0
    out = model(torch.log(x))  # bad
    loss = (out.squeeze(1) - x.sum(1)).square().mean()
    if loss.isnan().any():
        print("skipping a batch")
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
model.eval()
for p in model.parameters():
    p.grad = None
check = model(torch.rand(4, 6)).square().mean()
check.backward()
opt.step()
