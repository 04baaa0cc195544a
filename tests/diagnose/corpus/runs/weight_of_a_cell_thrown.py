# kind: growth within a step, of a weight that the first step made large, in a loop by hand
# expect: growth mm|addmm|matmul|linear
# says: weight of SGD grew from 1 before step 1 to \d+\.?\d* before step 2
# cure: lower the learning rate of SGD, or clip the gradients before its step:\n.*clip_grad_norm_
# never: weights that start smaller|orthogonal_
# step: 2
import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(2, 64), nn.Linear(64, 1)
        self.again = nn.Parameter(torch.eye(64))

    def forward(self, x):
        h = torch.zeros(len(x), 64)
        for now in x.unbind(1):
            h = torch.relu(self.enter(now) + h @ self.again)  # bad
        return self.head(h)


torch.manual_seed(0)
value, mark = torch.rand(32, 60), torch.zeros(32, 60)
mark.scatter_(1, torch.stack([torch.randperm(60)[:2] for _ in range(32)]), 1.0)
x, y = torch.stack([value, mark], 2), (value * mark).sum(1, keepdim=True)
model = Cell()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for _ in range(3):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
