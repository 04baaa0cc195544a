# kind: growth within a step: no start of the weight prevents that a residual stream doubles
# expect: maths addmm
# cure: self\.step\(torch\.nn\.functional\.layer_norm\(h, h\.shape\[-1:\]\)\)
# says: grow [23]\.\d+-fold from call to call in this step
# learns: losses[-1] < losses[0] / 10
import torch
from torch import nn

torch.manual_seed(3)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.step, self.out = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        with torch.no_grad():
            self.step.weight.mul_(6)

    def forward(self, x):
        h = self.first(x)
        for _ in range(80):
            h = h + torch.relu(self.step(h))  # bad
        return self.out(h)


model, losses = Residual(), []
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(40):
    x = torch.randn(32, 6)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
