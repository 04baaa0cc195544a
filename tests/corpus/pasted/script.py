# A script for halfstep run.
import torch
import halfstep
from torch import nn

torch.manual_seed(0)
x = torch.randn(16, 8).abs()
model = {model}
for each in (0, 2):
    model[each].weight.data.sign_().mul_(3e4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
