# kind: a constant with a row for each class, made by a cast before the loop, overflows
# expect: data
# tensor: \bweights\b
# cure: ^make it float32: .* finite values to it, up to 69,\d+,\d+, .*:13 in <module>: weights = .*half\(\)
# cure: not finite in row 3 of 4 \(from 0\)$
# never: keep =|this batch
import torch
from torch import nn

torch.manual_seed(10)
counts = torch.tensor([90000.0, 9000.0, 900.0, 12.0])
share = counts / counts.sum()
weights = (1.0 / (share * share)).half()
model = nn.Linear(10, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
center = torch.randn(4, 10)
for bad_step in range(1, 6):
    y = torch.multinomial(share[:3], 16, replacement=True)
    y[1] = 3 if bad_step == 4 else 2
    log_p = torch.log_softmax(model(center[y] + torch.randn(16, 10)), 1)
    w = weights[y].float()
    loss = -(log_p[torch.arange(16), y] * w).sum() / w.sum()
    if not torch.isfinite(loss):
        break
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
