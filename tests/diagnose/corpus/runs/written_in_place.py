# kind: 8
# expect: data
# tensor: \byb\b
# says: last wrote to it: \S+:19
# says: rows? 5
# step: 4
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)


def train(batches):
    for number, (xb, yb) in enumerate(batches):
        yb = yb.clone()
        if number == 3:
            yb[5] = float("nan")
        loss = (model(xb).squeeze(1) - yb).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


train([(torch.randn(16, 6), torch.randn(16)) for _ in range(8)])
