# kind: 5
# expect: maths exp
# cure: amax
# says: equal formula
# never: clamp
# learns: bad_step and hits() > 0.8
import torch
from torch import nn

torch.manual_seed(3)
NODES = 120
label = torch.randint(0, 3, (NODES,))
points = 2 * torch.eye(3)[label] + 0.7 * torch.randn(NODES, 3)
source, target = torch.randint(0, NODES, (2, 1500))
near = label[source] == label[target]
source = torch.cat([source[near], torch.arange(NODES)])
target = torch.cat([target[near], torch.arange(NODES)])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.score = nn.Linear(3, 16), nn.Linear(32, 1)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.lift(x)
        both = torch.cat([hidden[target], hidden[source]], 1)
        weight = torch.exp(nn.functional.leaky_relu(self.score(both), 0.2).squeeze(1))  # bad
        total = torch.zeros(NODES).scatter_add(0, target, weight)
        mixed = torch.zeros_like(hidden).index_add(0, target, weight[:, None] * hidden[source])
        return self.out(mixed / total[:, None])


net, bad_step = Attention(), 0
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for step in range(60):
    bad_step = bad_step or (step == 20) * 21
    x = points * (1 if step < 20 else 150)
    loss = nn.functional.cross_entropy(net(x), label)
    opt.zero_grad()
    loss.backward()
    opt.step()


def hits():
    return (net(points).argmax(1) == label).float().mean().item()
