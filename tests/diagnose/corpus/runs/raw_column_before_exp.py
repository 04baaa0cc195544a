# kind: 2
# expect: maths exp
# cure: ^standardise \S*x\S*, as by .* reaches \d\d,\d\d\d in column 3 of 4 \(from 0\)[^\n]*$
# says: the loss falls
# never: clamp
import torch
from torch import nn

torch.manual_seed(0)
features = torch.cat([torch.randn(256, 3), torch.rand(256, 1) * 3e4], 1)
price = 2 * features[:, 0] + features[:, 3] / 3e4
first, last = nn.Linear(4, 32), nn.Linear(32, 1)
optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=1e-3)
for row in range(0, 256, 64):
    x, y = features[row : row + 64], price[row : row + 64]
    h = nn.functional.silu(first(x))
    loss = (last(torch.exp(0.01 * h)).squeeze(1) - y).square().mean()  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
