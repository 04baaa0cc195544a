# kind: 2
# expect: growth
# cure: raised the learning rate of AdamW from 0\.001 to .*: \w
# cure: \.py:\d+: main = torch.optim.lr_scheduler.ExponentialLR\(optimizer, 1\.2\)
# never: weight_decay
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
main = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.2)
rates = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, main], [20])
for step in range(1, 121):
    x = torch.randn(64, 16)
    loss = (model(x).squeeze(1) - x.sum(1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rates.step()
