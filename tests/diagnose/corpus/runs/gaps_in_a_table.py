# kind: 6
# expect: data
# tensor: \bfeatures\b
# cure: last wrote to it: \S+:15 in __init__: self\.x\[
# cure: x of Table is not finite in rows 3, 40, 90, 91 and 150 of 160 \(from 0\), column 3 of 5 \(from 0\)
# cure: keep = \S*features\S*\.isfinite\(\)[^~]*\nor leave this batch out\n
# step: 2
import torch
from torch import nn


class Table(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.rand(160, 5)
        self.x[[3, 40, 90, 91, 150], 3] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[i, :1]


torch.manual_seed(0)
model = nn.Linear(5, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
data, _ = torch.utils.data.random_split(Table(), [150, 10])
for features, target in torch.utils.data.DataLoader(data, batch_size=32):
    loss = (model(features) - target).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
