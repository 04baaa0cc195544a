# kind: 1
# expect: optimizer div|div_
# says: gradients were finite
# step: 11
# says: tried for . steps of NormalizedSGD on this batch: the loss stays at 0
import torch
from torch import nn

torch.manual_seed(0)


class NormalizedSGD(torch.optim.Optimizer):
    """From a gist: every tensor moves by the same length."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                direction = p.grad / p.grad.norm()  # bad
                p.add_(direction, alpha=-group["lr"])


model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
opt = NormalizedSGD(model.parameters())
for i in range(20):
    x = torch.randn(32, 6)
    weight = 0.0 if i == 10 else 1.0  # no row of this batch counts
    loss = (nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long(), reduction="none") * weight).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
