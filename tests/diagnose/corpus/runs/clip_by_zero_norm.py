# kind: 1
# expect: maths div|div_|mul|mul_|reciprocal|rdiv|true_divide
# says: gradient|grad
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(20):
    x = torch.randn(32, 6)
    weight = 0.0 if i == 10 else 1.0
    loss = (nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long(), reduction="none") * weight).mean()
    opt.zero_grad()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(1.0 / norm)  # bad
    opt.step()
