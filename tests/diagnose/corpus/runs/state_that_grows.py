# kind: 1
# expect: data
# step: 8
# tensor: v of weight in Running
# says: the state was finite before step 4, so it went bad in one of the steps 4 to 7
import torch
from torch import nn


class Running(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            v = state.setdefault("v", torch.ones_like(p))
            v.mul_(1e8).add_(p.grad.square())
            p.addcdiv_(p.grad, v.sqrt() + 1e-8, value=-self.param_groups[0]["lr"])


torch.manual_seed(0)
model = nn.Linear(5, 1)
optimizer = Running(model.parameters())
for _ in range(10):
    x = torch.randn(16, 5)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
