# kind: a cure at the result of layers, which their own products do not get
# expect: maths
# step: 41
# cure: self.net\(x\).clamp_min\(\S+\).squeeze\(1\)
# says: it changes 1 of 32 values
import torch
from torch import nn


class Prices(nn.Module):
    def __init__(self):
        super().__init__()
        first, second, last = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

    def forward(self, x):
        return self.net(x).squeeze(1)


def loss_of(prediction, price):
    return torch.nn.functional.mse_loss(torch.log(prediction + 1), torch.log(price + 1)).sqrt()


torch.manual_seed(0)
model = Prices()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(1, 61):
    x = torch.rand(32, 4) * 2 - 1
    price = (0.5 + 0.4 * x[:, 0]) * (0.1 * torch.randn(32)).exp()
    if step == 41:
        x[7] = torch.tensor([-60.0, 0.0, 0.0, 0.0])
    loss = loss_of(model(x), price)
    opt.zero_grad()
    loss.backward()
    opt.step()
