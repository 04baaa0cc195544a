# thread: xianglin226/scMDC 8
# expect: inputs: float64 [2, 4], of line #1
# expect: 0.weight of Sequential: float32 [8, 4]

import numpy as np
from torch.utils.data import DataLoader, Dataset

class Table(Dataset):
    def __init__(self):
        self.x = np.random.default_rng(0).normal(size=(4, 4))
        self.y = np.arange(4.0)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), self.y[i]

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
for epoch in range(1):
    for inputs, targets in DataLoader(Table(), batch_size=2):  #1
        outputs = model(inputs)  #!
