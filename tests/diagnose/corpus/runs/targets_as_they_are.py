# kind: 2
# expect: growth
# cure: ^standardise \S*price\S*, as by .* reaches [\d,]{7}
# never: clamp\(
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for i in range(1, 74):
    x = torch.rand(64, 8)
    price = 250_000 * x.sum(1) + 90_000
    loss = nn.functional.mse_loss(model(x).squeeze(1), price)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
