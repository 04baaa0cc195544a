# kind: 8
# expect: range sum
# step: 1
# says: it adds 16,384 values, with a mean of 9\.\d+; if no later line divides the sum, take the mean
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(2):
    x = torch.randn(256, 64) * 3
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (net(x) - x.half()).square().sum()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
