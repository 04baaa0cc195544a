# kind: 8
# expect: range _to_copy
# step: 8
# says: the cast gives inf in row 7 of 32 \(from 0\), column 3 of 5 \(from 0\) \(values there reach 80,000
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(5, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for i in range(1, 20):
    x = torch.rand(32, 5)
    if i == 8:
        x[7, 3] = 8e4
    h = x.half().float() * 1e-4  # bad
    loss = (net(h).squeeze(1) - h.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
