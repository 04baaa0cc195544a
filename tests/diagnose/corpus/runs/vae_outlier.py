# kind: 2
# expect: range exp
# says: clip the gradients before each step, too.* without that the loss is inf or NaN in step 2
# says: the gradient of the first step with it is .* times the last one
# says: tried for \d+ steps of SGD on this batch \(in turn with the one before\): the loss falls
import torch
from torch import nn

torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mu = nn.Linear(32, 64), nn.Linear(64, 8)
        self.logvar, self.dec = nn.Linear(64, 8), nn.Linear(8, 32)

    def forward(self, x):
        h = torch.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        var = logvar.exp()  # bad
        kl = 0.5 * (var + mu * mu - 1 - logvar).mean()
        return self.dec(mu + torch.randn_like(mu) * var.sqrt()), kl


model = VAE().half()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(10):
    x = torch.randn(16, 32).half() * (60 if i == 6 else 1)
    out, kl = model(x)
    loss = (out - x).square().mean() + 0.01 * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
