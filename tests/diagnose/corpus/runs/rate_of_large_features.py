# kind: 2
# expect: growth mse_loss
# cure: lower the learning rate of SGD to [456789]\.\d+e-05
# never: clip
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(9, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(20):
    x = torch.randn(100, 9) * 20 + 30
    loss = nn.functional.mse_loss(model(x).squeeze(1), x.sum(1))  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
