# kind: 1
# form: step
# expect: optimizer div|div_
# says: gradients were finite
import torch
from torch import nn

torch.manual_seed(0)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            update = p.grad / p.grad.norm(dim=-1, keepdim=True)  # bad
            p.add_(update, alpha=-self.param_groups[0]["lr"])


model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.ReLU(), nn.Linear(16, 2, bias=False))
with torch.no_grad():
    model[0].weight[3] = -1.0
opt = Muon(model.parameters(), 0.02)
x = torch.rand(32, 6)


def step():
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    return loss
