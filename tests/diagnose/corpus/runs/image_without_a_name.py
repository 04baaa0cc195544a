# kind: 8
# expect: data
# tensor: \bx\b
# never: without a name
# says: rows 2 and 7
# step: 3
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(256, 4)

    def forward(self, image):
        return self.head(self.conv(image).flatten(1))


def batch(i):
    x = torch.randn(16, 10, 10)
    if i == 2:
        x[2, 0, 0] = x[7, 1, 1] = float("inf")
    return x


model = Net()
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for i in range(5):
    x = batch(i)
    loss = model(x[:, None]).square().mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
