# kind: 5
# expect: maths log
# says: it changes 1 of 32 values.*leave row 3 of 32 \(from 0\) out
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(30):
    x = torch.randn(32, 6)
    price = torch.exp(x[:, 0])
    if i == 7:
        price[3] = 0.0
    loss = (model(x).squeeze(1) - torch.log(price)).square().mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
