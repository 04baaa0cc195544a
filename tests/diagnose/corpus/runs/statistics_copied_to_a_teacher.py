# kind: 6
# expect: data
# tensor: \bx\b
# step: 20
# says: it has made 1\.running_mean and 1\.running_var inf or NaN
# never: \n\nstep 2
import copy

import torch
from torch import nn

torch.manual_seed(0)
student = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
average = copy.deepcopy(student).requires_grad_(False).eval()
opt = torch.optim.Adam(student.parameters(), lr=1e-2)
for step in range(24):
    x = torch.randn(32, 6)
    if step == 19:
        x[4, 1] = float("nan")
    out = student(x)
    loss = (out.squeeze(1) - x.sum(1)).square().mean()
    if loss.isnan():
        continue
    loss = loss + (out - average(x)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    held = dict(average.named_buffers())
    for name, buffer in student.named_buffers():
        held[name].data.copy_(buffer)
