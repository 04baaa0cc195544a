# kind: a cast that is there for its rounding overflows
# expect: range _to_copy
# cure: ^return t \+ \(t\.clamp\(-65504, 65504\)\.half\(\)\.float\(\) - t\)\.detach\(\)
# learns: losses[-1] < losses[8]
import torch
from torch import nn

torch.manual_seed(5)


def rounded(t):
    return t + (t.half().float() - t).detach()  # bad


model = nn.Linear(6, 1)
optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
for step in range(15):
    x = torch.randn(64, 6)
    if step >= 8:
        x[:, 0] = 1e5 + x[:, 0]
    loss = nn.functional.smooth_l1_loss(model(rounded(x)).squeeze(1), x[:, 1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
