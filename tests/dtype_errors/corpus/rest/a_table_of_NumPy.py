# expect: x: float64 [8, 7]
# cure: loss = criterion(model(x), y.to(torch.float32))

import numpy as np
from torch.utils.data import DataLoader, Dataset

class Table(Dataset):
    def __init__(self):
        self.x = np.random.default_rng(0).normal(size=(16, 7))
        self.y = self.x[:, 0] * 2 - self.x[:, 3]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(7, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.out(F.relu(self.hidden(x))).squeeze(1)  #!

model, criterion = MLP(), nn.HuberLoss()
for epoch in range(2):
    for x, y in DataLoader(Table(), batch_size=8):
        loss = criterion(model(x), y)
        loss.backward()
