# kind: 7
# expect: data
# cure: ^first check this line, .* is loaded: \S+:23 in (<listcomp>|collate): return torch.stack
# step: 3
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sounds(Dataset):
    def __init__(self):
        self.waves = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
        self.waves[37] = 0

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, i):
        return self.waves[i]


def collate(rows):
    return torch.stack([(row - row.mean()) / row.std() for row in rows])


torch.manual_seed(0)
net = nn.Linear(16, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
for x in DataLoader(Sounds(), 16, collate_fn=collate):
    loss = (net(x) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
