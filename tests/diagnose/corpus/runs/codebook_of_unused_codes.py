# kind: 3
# expect: maths div
# says: `div` of `vq` is not finite; it made vq\.embed inf or NaN; the loss of this step is finite
# never: without a name
# step: 1
# learns: loss < 0.8
import torch
from torch import nn


class Codes(nn.Module):
    def __init__(self, num=64, dim=8):
        super().__init__()
        self.register_buffer("embed", torch.randn(num, dim))
        self.register_buffer("size", torch.zeros(num))
        self.register_buffer("total", torch.zeros(num, dim))

    def forward(self, z):
        code = torch.cdist(z, self.embed).argmin(1)
        q = self.embed[code]
        with torch.no_grad():
            hot = nn.functional.one_hot(code, len(self.size)).to(z.dtype)
            self.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.total.mul_(0.9).add_(hot.T @ z, alpha=0.1)
            self.embed.copy_(self.total / self.size.unsqueeze(1))  # bad
        return z + (q - z).detach()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.vq, self.dec = nn.Linear(6, 8), Codes(), nn.Linear(8, 6)

    def forward(self, x):
        return self.dec(self.vq(self.enc(x)))


torch.manual_seed(8)
model = Net()
opt = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(60):
    x = torch.randn(64, 2) @ torch.ones(2, 6)
    loss = (model(x) - x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
