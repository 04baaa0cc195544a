# kind: 3
# expect: maths reciprocal|div
# says: crit\.weight.* comes from it, and was made before
# cure: \(num \* counts\)\.masked_fill\(
# step: 11
# learns: loss < 1.5
import torch
from torch import nn

torch.manual_seed(27)
labels = torch.randint(0, 3, (600,))
labels[300::7] = 3  # only later ones
x = torch.randn(4, 8)[labels] * 2 + torch.randn(600, 8)


def balanced(labels, num=4):
    counts = torch.bincount(labels, minlength=num).float()
    return len(labels) / (num * counts)  # bad


crit = nn.CrossEntropyLoss(weight=balanced(labels[:300]))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(20):
    rows = slice(30 * i, 30 * i + 30)
    loss = crit(net(x[rows]), labels[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
