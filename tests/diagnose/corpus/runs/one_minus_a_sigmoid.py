# kind: 1
# expect: maths
# step: 13
# cure: F\.logsigmoid\(-logits\)
# never: clamp_min\(1\)
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 1)

    def forward(self, x):
        return torch.sigmoid(self.l(x))


m = Net()
o = torch.optim.SGD(m.parameters(), 1e-3)
for i in range(1, 21):
    x = torch.randn(8, 4) * (40 if i > 12 else 1)
    with torch.autocast("cpu", torch.float16):
        p = m(x)
        loss = -torch.log(1 - p).mean()
    o.zero_grad()
    loss.backward()
    o.step()
