# kind: 2
# expect: range
# cure: ^standardise \S*x\S*, as by .* reaches \d\d\d,\d\d\d in column 0 of 5 \(from 0\)
# cure: \nor 
# says: the loss falls
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
seconds, others = torch.rand(256, 1) * 9e5, torch.randn(256, 4)
y = (others[:, 0] + seconds[:, 0] / 9e5 > 0.5).long()
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for x, label in DataLoader(TensorDataset(torch.cat([seconds, others], 1), y), batch_size=64):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
