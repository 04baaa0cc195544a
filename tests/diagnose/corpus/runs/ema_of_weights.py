# kind: 1
# expect: optimizer div|div_|sqrt|mul
# says: gradients were finite
# learns: loss < 1.0
import torch
from torch import nn

torch.manual_seed(0)


class Adafactor(torch.optim.Optimizer):
    """Factored second moments, as in a blog post."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                square = p.grad.square()
                if p.dim() == 2:
                    rows, cols = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
                    scale = rows * cols / rows.mean()
                else:
                    scale = square
                p.sub_(p.grad / scale.sqrt(), alpha=group["lr"])  # bad


model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
with torch.no_grad():
    model[0].bias[2] = -50.0  # a dead unit
opt = Adafactor(model.parameters(), lr=1e-2)
for i in range(150):
    x = torch.randn(32, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
