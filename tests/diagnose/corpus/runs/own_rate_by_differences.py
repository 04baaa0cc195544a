# kind: 1
# expect: optimizer div|reciprocal
# says: Secant made \d+ of \d+ entries of \S* NaN
# never: with zeros in place
# cure: \.clamp_min\(1e-06\)|\+ 1e-06
# learns: 0 <= losses[-1] < losses[0] / 2
import torch
from torch import nn


class Secant(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"start": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                kept, rate = self.state[weight], group["start"]
                if kept:
                    moved = (weight - kept["old"]).norm()
                    rate = (moved / (weight.grad - kept["slope"]).norm()).clamp(max=0.05)  # bad
                kept["old"], kept["slope"] = weight.clone(), weight.grad.clone()
                weight -= rate * weight.grad


torch.manual_seed(0)
x, model, losses = torch.randn(60, 4), nn.Linear(4, 1), []
opt = Secant(model.parameters())
for i in range(30):
    wanted = x.sum(1, keepdim=True) if i < 10 else model(x).detach()  # a frozen phase
    loss = (model(x) - wanted).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append((model(x) - x.sum(1, keepdim=True)).square().mean().item())
