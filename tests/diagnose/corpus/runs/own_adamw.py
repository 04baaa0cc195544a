# kind: 1
# expect: optimizer div|div_|mul|addcdiv_
# says: gradients were finite
# step: 1
import torch
from torch import nn

torch.manual_seed(0)


class MyAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, wd=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, wd=wd))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["t"] = 0
                    s["m"], s["v"] = torch.zeros_like(p), torch.zeros_like(p)
                t = torch.tensor(float(s["t"]))
                s["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                m_hat = s["m"] / (1 - b1**t)  # bad
                v_hat = s["v"] / (1 - b2**t)
                s["t"] += 1
                p.mul_(1 - group["lr"] * group["wd"])
                p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))


model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
opt = MyAdamW(model.parameters())
for i in range(20):
    x = torch.randn(32, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
