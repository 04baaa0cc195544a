# kind: 4
# expect: data
# step: 3
# cure: in __getitem__: def __getitem__
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Sounds(Dataset):
    def __init__(self):
        self.waves = torch.rand(64, 6)
        self.waves[37] = 0.0

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, i):
        return self.waves[i].log(), i % 2


def collate(batch):
    x, labels = zip(*batch)
    return torch.stack(x), torch.tensor(labels)


model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, label in DataLoader(Sounds(), batch_size=16, collate_fn=collate):
    loss = nn.functional.cross_entropy(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
