# kind: a product overflows since an exp before it is large
# expect: maths mul
# cure: score.*(clamp|tanh)
# never: clamp\(-10000
# learns: losses[-1] < losses[5]
import torch
from torch import nn

torch.manual_seed(8)
score, value = nn.Linear(6, 1), nn.Linear(6, 1)
optimizer = torch.optim.Adam([*score.parameters(), *value.parameters()], lr=1e-2)
losses = []
for step in range(60):
    x = torch.randn(64, 6)
    if step == 8:
        x[9] = 80 * score.weight[0].detach() / score.weight[0].detach().square().sum()
    weights = score(x).exp()
    error = value(x) - x[:, :1].tanh()
    loss = (weights * (1e6 * error.abs())).log1p().mean() - 0.1 * score(x).tanh().mean()  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
