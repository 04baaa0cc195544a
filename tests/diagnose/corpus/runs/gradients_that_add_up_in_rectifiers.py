# kind: 2
# expect: growth
# step: 12
# cure: ^optimizer\.zero_grad\(\)  # after each step of SGD
# never: clamp
import torch
from torch import nn

torch.manual_seed(3)
layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9, nesterov=True)
for i in range(1, 21):
    x = torch.randn(16, 16)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if i == 15:
        optimizer.zero_grad()
