# kind: 8
# expect: data
# cure: make it float32: this line wrote finite values to it, .*features = table.half\(\)
# cure: or standardise it before that, as by \(x - x.mean
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)
income, age = torch.rand(256, 1) * 90_000, torch.rand(256, 1) * 80
table = torch.cat([income, age], 1)
features = table.half()
data = DataLoader(TensorDataset(features, (age > 40).float()), batch_size=64)
model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for x, y in data:
    loss = nn.functional.binary_cross_entropy_with_logits(model(x.float()), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
