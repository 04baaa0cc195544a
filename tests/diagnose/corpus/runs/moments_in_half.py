# kind: 1
# expect: optimizer div
# says: square is 0 there, which float16 rounds small values to
# cure: keep square in float32
# never: clamp_min
# step: 1
import torch
from torch import nn


class Adam16(torch.optim.Optimizer):
    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.float16)
                    state["square"] = torch.zeros_like(p, dtype=torch.float16)
                state["mean"].mul_(0.9).add_(p.grad.half(), alpha=0.1)
                state["square"].mul_(0.999).add_(p.grad.half().square(), alpha=0.001)
                p -= group["lr"] * state["mean"].float() / state["square"].float().sqrt()  # bad


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = Adam16(model.parameters(), lr=1e-3)
for k in range(5):
    x = torch.randn(32, 6)
    loss = 0.01 * (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
