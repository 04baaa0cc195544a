# kind: 1
# expect: optimizer div|div_|mul|mul_
# says: gradients were finite
# step: 1
import torch
from torch import nn

torch.manual_seed(0)


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, betas=(0.9, 0.999), eps=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s = self.state[p]
                if len(s) == 0:
                    s["exp_avg"], s["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                s["exp_avg"].lerp_(p.grad, 1 - b1)
                s["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                update = s["exp_avg"] / (s["exp_avg_sq"].sqrt() + 1e-6)
                trust = p.norm() / update.norm()  # bad
                p.add_(update * trust, alpha=-group["lr"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.gate = nn.Linear(6, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.body(x) + self.gate.detach() * self.gate * 0


model = Net()
opt = Lamb(model.parameters())
for i in range(10):
    x = torch.randn(16, 6)
    loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
