# kind: 3
# expect: optimizer reciprocal
# says: SAM made .* NaN.*; its gradients were finite
# never: checkpoint
# step: 3
# learns: losses[-1] < 0.1
import torch
from torch import nn

torch.manual_seed(0)
losses = []


class SAM(torch.optim.Optimizer):
    def __init__(self, params, lr, rho):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def climb(self, params):
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        scale = self.param_groups[0]["rho"] / norm  # bad
        for p in params:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad * scale)

    @torch.no_grad()
    def step(self, closure):
        params = self.param_groups[0]["params"]
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.climb(params)
        closure()
        for p in params:
            p.copy_(self.state[p]["before"]).sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


model = nn.Linear(5, 1)
opt = SAM(model.parameters(), lr=0.3, rho=0.05)
for _ in range(9):
    y = torch.randint(0, 2, (16, 1)) * 2.0 - 1
    x = torch.randn(16, 5) * 0.3 + y

    def closure():
        opt.zero_grad()
        loss = torch.relu(1 - y * model(x)).mean()
        loss.backward()
        return loss

    losses.append(opt.step(closure).item())
