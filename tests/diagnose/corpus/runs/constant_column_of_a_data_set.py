# kind: 6
# expect: maths div
# step: 1
# says: table.* comes from it, and was made before the loop or in its first step
# never: in __getitem__
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sensors(Dataset):
    def __init__(self):
        raw = torch.randn(64, 5)
        raw[:, 3] = 2.5
        low, high = raw.amin(0), raw.amax(0)
        self.table = (raw - low) / (high - low)  # bad

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return self.table[i], self.table[i, :1]


torch.manual_seed(0)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for x, y in DataLoader(Sensors(), batch_size=16):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
