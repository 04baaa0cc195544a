# kind: 3
# expect: maths log
# says: call 2 of its closure
import math
import torch
from torch import nn

torch.manual_seed(0)
steps, bad_step = 0, None


class SAM(torch.optim.Optimizer):
    def __init__(self, params, rho, lr):
        super().__init__(params, {"rho": rho, "lr": lr})

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        closure()
        params = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        moves = [p.grad * (self.param_groups[0]["rho"] / norm) for p in params]
        for p, move in zip(params, moves):
            p.add_(move)
        closure()
        for p, move in zip(params, moves):
            p.sub_(move).sub_(self.param_groups[0]["lr"] * p.grad)


model = nn.Linear(4, 1)
nn.init.constant_(model.weight, 0.0)
nn.init.constant_(model.bias, 0.2)
opt = SAM(model.parameters(), rho=0.5, lr=0.05)
for i in range(30):
    steps += 1
    x = torch.rand(32, 4)

    def closure():
        global bad_step
        opt.zero_grad()
        rate = model(x)
        loss = ((1.2 - rate).square() - 0.01 * torch.log(rate)).mean()  # bad
        loss.backward()
        if bad_step is None and not math.isfinite(loss.item()):
            bad_step = steps
        return loss

    opt.step(closure)
