# kind: 1
# expect: optimizer div
# says: PolyakSGD made 48 of 48 entries of 0\.weight NaN
# says: its gradients were finite
# never: could not be taken again
# cure: ^lr = loss\.detach\(\) / sq\.clamp_min\(
# learns: loss.isfinite()
import torch
from torch import nn

torch.manual_seed(7)


class PolyakSGD(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, loss, *, most):
        weights = [p for g in self.param_groups for p in g["params"]]
        sq = sum((p.grad**2).sum() for p in weights)
        lr = loss.detach() / sq  # bad
        for p in weights:
            p.add_(-lr.clamp_max(most) * p.grad)


x = torch.randn(32, 6)
y = torch.sign(x[:, 0])
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
opt = PolyakSGD(model.parameters(), {})
for _ in range(21):
    rows = torch.randint(0, 32, (4,))
    loss = torch.relu(1 - y[rows] * model(x[rows]).squeeze(1)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step(loss, most=0.5)
