# kind: 8
# expect: range _to_copy
# step: 1
# cure: ^standardise \S*x\S*, as by .* reaches 2\d\d,\d\d\d in column 1 of 3
# never: not tried: standardise
import torch
from torch import nn

torch.manual_seed(10)
x = torch.stack([torch.rand(64) * 3, torch.rand(64) * 250_000, torch.randn(64)], 1)
y = x[:, :1] - x[:, 2:] + x[:, 1:2] / 1e5
model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)).half()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(3):
    i = torch.randint(0, 64, (32,))
    loss = (model(x[i].half()).float() - y[i]).square().mean()  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
