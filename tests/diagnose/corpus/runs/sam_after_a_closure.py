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
    def __init__(self, params, base, rho=0.05, **kw):
        super().__init__(params, {"rho": rho, **kw})
        self.base = base(self.param_groups, **kw)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self):
        (group,) = self.param_groups
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        scale = group["rho"] / norm  # bad
        for p in group["params"]:
            self.state[p]["e"] = p.grad * scale
            p.add_(self.state[p]["e"])

    @torch.no_grad()
    def step(self, closure):
        self.ascend()
        torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["e"])
        self.base.step()


model = nn.Linear(5, 1)
opt = SAM(model.parameters(), torch.optim.SGD, lr=0.3)
for _ in range(9):
    y = torch.randint(0, 2, (16, 1)) * 2.0 - 1
    x = torch.randn(16, 5) * 0.3 + y

    def closure():
        opt.zero_grad()
        loss = torch.relu(1 - y * model(x)).mean()
        loss.backward()
        return loss

    losses.append(closure().item())
    opt.step(closure)
