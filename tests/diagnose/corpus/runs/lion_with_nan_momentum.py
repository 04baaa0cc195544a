# kind: 1
# expect: data
# says: momentum_buffer.* of weight
# says: checkpoint
# step: 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
buffer = torch.zeros(1, 6)
buffer[0, 2] = float("inf")
opt.state[model.weight]["momentum_buffer"] = buffer
for i in range(6):
    x = torch.randn(16, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
