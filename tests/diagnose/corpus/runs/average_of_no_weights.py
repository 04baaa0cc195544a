# kind: 8
# expect: maths div
# says: what the loop wrote to weight comes from it
# cure: p.data.copy_\(total.data / max\(count, 1\)\)
# step: 4
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
totals, count = [torch.zeros_like(p) for p in model.parameters()], 0


def swap_in():
    for total, p in zip(totals, model.parameters()):
        p.data.copy_(total.data / count)  # bad


for step in range(1, 8):
    loss = model(torch.randn(16, 6)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step == 3:
        swap_in()
