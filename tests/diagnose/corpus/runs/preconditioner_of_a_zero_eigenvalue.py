# kind: 1
# expect: optimizer pow
# step: 1
# says: of Shampoo on this batch: the loss falls
# learns: sum(losses[-5:]) < sum(losses[:5]) / 2
import torch
from torch import nn


def root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=0) ** -0.25) @ vectors.T  # bad


class Shampoo(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state, grad = self.state[p], p.grad.reshape(len(p), -1)
            state["left"] = state.get("left", 0.0) + grad @ grad.T
            state["right"] = state.get("right", 0.0) + grad.T @ grad
            p.sub_(0.05 * (root(state["left"]) @ grad @ root(state["right"])).view_as(p))


torch.manual_seed(0)
model, losses = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), []
optimizer = Shampoo(model.parameters(), {})
for _ in range(60):
    x = torch.randn(32, 6)
    x[:, 5] = 0.0
    loss = (model(x) - x[:, :1] - x[:, 2:3]).square().mean()
    losses.append(float(loss))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
