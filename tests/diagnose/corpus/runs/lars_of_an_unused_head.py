# kind: 1
# expect: optimizer div
# tensor: heads\.1\.weight
# step: 6
# says: reads    float32\[\]: 0\.3779 to 0\.3779
# learns: losses[-1] < 0.1
import torch
from torch import nn


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm() / p.grad.norm()  # bad
                p.add_(p.grad * ratio, alpha=-group["lr"])


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 1, bias=False) for _ in range(2))

    def forward(self, x, is_first):
        return torch.where(is_first, self.heads[0](x), self.heads[1](x))


torch.manual_seed(0)
model, losses = TwoHeads(), []
opt = Lars(model.parameters(), lr=0.05)
for i in range(1, 101):
    x = torch.randn(32, 6)
    is_first = torch.rand(32, 1) < (1.0 if i == 6 else 0.5)
    loss = (model(x, is_first) - x.sum(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
