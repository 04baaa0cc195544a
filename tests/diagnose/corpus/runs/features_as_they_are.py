# kind: 2
# expect: growth mse_loss
# cure: ^standardise \S*x\S*, as by .* reaches 2,0\d\d in column 2 of 3 \(from 0\), 2\d\d in the others
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(10)
n = 512
area, rooms = torch.rand(n, 1) * 180 + 30, torch.randint(1, 7, (n, 1)).float()
features = torch.cat([area, rooms, torch.randint(1950, 2021, (n, 1)).float()], 1)
price = 0.02 * area[:, 0] + 0.3 * rooms[:, 0]
model = nn.Sequential(nn.Linear(3, 32), nn.LeakyReLU(0.1), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for x, y in DataLoader(TensorDataset(features, price), batch_size=64):
    loss = F.mse_loss(model(x).squeeze(1), y)  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
