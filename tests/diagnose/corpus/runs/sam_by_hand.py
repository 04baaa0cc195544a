# kind: 1
# expect: maths reciprocal
# says: what the loop wrote to 0.weight comes from it: .* in ascend: p.add_\(g\)
# never: checkpoint|not finite before the step
# step: 6
# learns: losses[-1] < 0.1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []


@torch.no_grad()
def ascend():
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    scale = 0.01 / norm  # bad
    moves = [p.grad * scale for p in model.parameters()]
    for p, g in zip(model.parameters(), moves):
        p.add_(g)
    return moves


for step in range(1, 13):
    x = torch.randn(16, 4)
    x[:, 0] = 2 * x[:, 0].sign() * (8 if step == 6 else 1)
    for is_second in (False, True):
        loss = torch.relu(0.5 - model(x)[:, 0] * x[:, 0].sign()).mean() * (step != 6)
        model.zero_grad()
        loss.backward()
        if is_second:
            with torch.no_grad():
                for p, g in zip(model.parameters(), moves):
                    p.sub_(g)
            opt.step()
        else:
            moves = ascend()
    losses.append(loss.item())
