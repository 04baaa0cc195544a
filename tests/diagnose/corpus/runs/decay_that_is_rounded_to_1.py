# kind: 1
# expect: optimizer div
# cure: ^keep decay as Python numbers, or in float32: bfloat16 rounds what is above 0\.998\d+ to 1
# never: keep average in float32
import torch
from torch import nn


class Normed(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["decay"] = torch.tensor(0.9995).to(p.dtype)
                state["average"] = torch.zeros_like(p)
            state["average"].mul_(state["decay"]).add_((1 - state["decay"]) * p.grad.square())
            size = (state["average"] / (1 - state["decay"])).sqrt()  # bad
            p.sub_(0.01 * p.grad / (size + 1e-3))


torch.manual_seed(0)
model = nn.Linear(6, 2, dtype=torch.bfloat16)
optimizer = Normed(model.parameters())
for i in range(1, 5):
    loss = model(torch.randn(8, 6).bfloat16()).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
