# kind: 4
# expect: range _to_copy
# says: z = torch\.log1p\(price\) 
# never: clamp
# step: 20
# learns: loss < 60
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    def forward(self, price):
        z = torch.log1p(price.to(torch.float16))  # bad
        return self.body(z)
model = Net()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(1, 27):
    price = torch.rand(32, 3) * (6e4 if step < 20 else 9e5)
    with torch.autocast("cpu", torch.float16):
        out = model(price)
    loss = (out.float() - torch.log1p(price[:, :1])).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
