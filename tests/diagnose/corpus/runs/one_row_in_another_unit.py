# kind: 8
# expect: range _to_copy
# step: 6
# cure: ^leave out row 3 of 16 \(from 0\), or check .*: \S*x\S* reaches [\d,]{7,}, and .* reached \d\.\d;
# never: standardise
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(7):
    x = torch.randn(16, 4)
    y = x[:, :1] - x[:, 1:2]
    if step == 5:
        x[3] *= 1e6
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (net(x).float() - y).square().mean()  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
