# kind: 1
# expect: optimizer pow
# step: 1
# says: tried for . steps of Preconditioned on this batch: the loss falls
# learns: losses[-1] < losses[0] / 2
import torch
from torch import nn


class Preconditioned(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state, grad = self.state[p], p.grad.reshape(len(p), -1)
            state["left"] = state.get("left", 0.0) + grad @ grad.T
            values, vectors = torch.linalg.eigh(state["left"])
            root = vectors @ torch.diag(values.clamp(min=0) ** -0.5) @ vectors.T  # bad
            p.sub_((root @ grad).view_as(p), alpha=self.param_groups[0]["lr"])


torch.manual_seed(0)
model, losses = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), []
optimizer = Preconditioned(model.parameters(), lr=0.02)
for _ in range(60):
    x = torch.randn(32, 4)
    loss = (model(x) - x[:, :1] * x[:, 1:2] - x[:, 2:3]).square().mean()
    losses.append(float(loss))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
