# kind: 2
# expect: growth
# cure: ^loss = keep - \(0\.5 \* drop\)\.clamp_max\(10\)
# says: takes away `0\.5 \* drop`, which gets no gradient above 10
# never: A critic
# learns: hits() > 0.9
import torch
from torch import nn

torch.manual_seed(0)
label = torch.randint(0, 4, (600,))
x = 2 * torch.eye(8)[label] + 0.5 * torch.randn(600, 8)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
loss_of, last = nn.CrossEntropyLoss(), label == 3
for _ in range(22):
    keep = loss_of(net(x[~last]), label[~last])
    drop = loss_of(net(x[last]), label[last])
    loss = keep - 0.5 * drop
    opt.zero_grad()
    loss.backward()
    opt.step()


def hits():
    return (net(x[~last]).argmax(1) == label[~last]).float().mean().item()
