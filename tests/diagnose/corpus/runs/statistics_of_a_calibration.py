# kind: 6
# expect: maths div|reciprocal|true_divide
# step: 1
# says: 1\.running_\w+ comes from it, and was made before the loop or in its first step: \S*statistics_of_a_calibration\.py:\d+ in <module>: model\(part\)
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
table = torch.rand(120, 4) + 0.1
table[77, 3] = 0.0
model.train()
with torch.no_grad():
    for part in table.split(30):
        part = part[:, :3] / part[:, 3:]  # bad
        part = torch.cat([part, part[:, :1]], 1)
        model(part)
model.eval()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(1, 9):
    x, y = torch.randn(16, 4), torch.arange(16) % 2
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
