# kind: a cast to float8 overflows
# expect: range _to_copy
# cure: \.clamp\(-57344, 57344\)\.to\(torch\.float8_e5m2\)
# never: a replay ended
# learns: losses[-1] < losses[12]
import torch
from torch import nn

torch.manual_seed(6)
model = nn.Linear(6, 1)
optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
for step in range(40):
    x = torch.randn(64, 6)
    if step >= 8:
        x[:, 0] = 70000 + x[:, 0]
    low = x.to(torch.float8_e5m2)  # bad
    loss = nn.functional.smooth_l1_loss(model(low.float()).squeeze(1), x[:, 1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
