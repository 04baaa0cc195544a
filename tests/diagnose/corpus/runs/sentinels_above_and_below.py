# kind: 2
# expect: maths _softmax
# step: 3
# cure: torch.softmax\(torch.stack\(\[far, near\], 1\).clamp\(-10000.0, 10000.0\), 1\)
# learns: True
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(5, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(6):
    z = nn.functional.normalize(model(torch.randn(12, 5)))
    label = torch.arange(12) % (1 if step == 2 else 3)
    same, distance = label == label[:, None], 1 - z @ z.T
    far = distance.masked_fill(~same, -torch.inf).amax(1)
    near = distance.masked_fill(same, torch.inf).amin(1)
    share = torch.softmax(torch.stack([far, near], 1), 1)  # bad
    loss = share[:, 0].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
