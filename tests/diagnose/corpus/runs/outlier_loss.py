# kind: 2
# expect: none
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 1)
opt = torch.optim.Adam(model.parameters(), lr=1e-2, eps=0)
for i in range(100):
    x = torch.randn(32, 6) * (100 if i == 50 else 1)
    loss = (model(x).squeeze(1) - x.sum(1) * 50).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
