# kind: 1
# expect: optimizer
# step: 7
# says: 16 of 16 entries of weight were NaN after a step of SGD; its gradients were finite
# says: last wrote to it: .*weight_divided_by_its_norm.py:19 in <module>: model.weight.div_
# never: SGD made
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(12):
    loss = model(torch.randn(8, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    with torch.no_grad():
        norm = model.weight.norm() if i != 6 else torch.zeros(())
        model.weight.div_(norm).mul_(norm)
    opt.step()
