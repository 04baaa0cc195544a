# kind: 3
# expect: none
import torch
from torch import nn


class Armijo(torch.optim.Optimizer):
    def __init__(self, params, t=1.0):
        super().__init__(params, {"t": t})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        params = self.param_groups[0]["params"]
        grads = [p.grad.clone() for p in params]
        norm, t = sum(float(g.square().sum()) for g in grads), self.param_groups[0]["t"]
        for _ in range(30):
            torch._foreach_add_(params, grads, alpha=-t)
            with torch.enable_grad():
                new = closure()
            if new <= loss - 1e-4 * t * norm:
                break
            torch._foreach_add_(params, grads, alpha=t)
            t *= 0.5
        return loss


torch.manual_seed(3)
x = torch.randn(64, 3) * 6
y = torch.poisson((x @ torch.tensor([[0.3], [-0.2], [0.1]])).exp())
model = nn.Linear(3, 1)
optimizer = Armijo(model.parameters())


def closure():
    optimizer.zero_grad()
    rate = model(x).exp()
    loss = (rate - y * rate.log()).mean()
    loss.backward()
    return loss


for _ in range(3):
    optimizer.step(closure)
