# kind: 1
# expect: optimizer div
# cure: ^keep betas as Python numbers, or in float32: bfloat16 rounds what is above 0\.998\d+ to 1
import torch
from torch import nn


class OwnAdam(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.002})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=p.dtype)
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["betas"] = torch.tensor([0.9, 0.999], dtype=p.dtype)
            state["step"] += 1
            state["m"].lerp_(p.grad, 0.1)
            state["v"].lerp_(p.grad.square(), 0.001)
            first, second = 1 - state["betas"] ** state["step"]
            size = (state["v"] / second).sqrt()  # bad
            p.sub_(0.002 * state["m"] / first / (size + 1e-6))


torch.manual_seed(0)
model = nn.Linear(6, 2, dtype=torch.bfloat16)
optimizer = OwnAdam(model.parameters())
for _ in range(4):
    x = torch.randn(8, 6).bfloat16()
    x[:, 2] = 0
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
