# kind: 2
# expect: growth
# cure: ^standardise \S*x\S*, as by .* reaches [\d,]+.*\nor lower the learning rate of SGD to \d.*e-0[78]: at
# never: input of MSELoss|clip
import torch
from torch import nn

torch.manual_seed(0)
x = torch.rand(256, 3) * torch.tensor([4000.0, 2000.0, 8.0])
y = x @ torch.tensor([[0.001], [0.0005], [0.1]])
model, criterion = nn.Linear(3, 1), nn.MSELoss()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    for rows in torch.randperm(256).split(64):
        loss = criterion(model(x[rows]), y[rows])  # bad
        opt.zero_grad()
        loss.backward()
        opt.step()
