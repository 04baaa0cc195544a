# kind: 1
# expect: growth pow
# cure: lower momentum
# never: lower the learning|clamp
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=1.0)
x = torch.randn(256, 10)
for i in range(150):
    loss = ((model(x) - 3 * x[:, :1]) ** 2).mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
