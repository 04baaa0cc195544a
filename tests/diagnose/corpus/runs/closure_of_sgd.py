# kind: 3
# expect: maths sqrt
# step: 6
# learns: loss.item() < 2
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for i in range(12):
    x = torch.randn(16, 4)
    y = x[:, :3] if i != 5 else model(x).detach()

    def closure():
        opt.zero_grad()
        distance = torch.sqrt((model(x) - y).square().sum(1)).mean()  # bad
        distance.backward()
        return distance

    loss = opt.step(closure)
