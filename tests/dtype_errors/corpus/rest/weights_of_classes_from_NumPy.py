# expect: yb: int32 [8], of line #1: for xb, yb in data
# cure: .long()

import numpy as np
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(7)
features = rng.normal(size=(32, 4)).astype(np.float32)
labels = features[:, :3].argmax(1).astype(np.int32)
weights = len(labels) / np.bincount(labels)
data = DataLoader(TensorDataset(torch.from_numpy(features), torch.from_numpy(labels)), 8)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
criterion = nn.CrossEntropyLoss(weight=torch.from_numpy(weights))
for xb, yb in data:  #1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(model(xb), yb)  #!
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
