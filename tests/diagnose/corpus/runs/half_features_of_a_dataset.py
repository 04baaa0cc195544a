# kind: 8
# expect: data
# tensor: \bx\b
# step: 6
# says: in __getitem__: return self.x\[i\].half\(\), self.x\[i, 0\]
# says: not finite in row 3 of 16 \(from 0\), column 1 of 3 \(from 0\) \(values there reach 60,\d\d\d, and float16 ends
# never: leave this batch out
import torch
from torch import nn


class Views(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.rand(160, 3)
        self.x[:, 1] = torch.linspace(1e3, 6e4, 160)
        self.x[83, 1] = 7e4
        self.x[84, 1] = 6e4

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i].half(), self.x[i, 0]


def collate(rows):
    return [torch.stack(each) for each in zip(*rows)]


torch.manual_seed(0)
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for x, y in torch.utils.data.DataLoader(Views(), batch_size=16, collate_fn=collate):
    x = x.float() * 1e-5
    loss = (net(x).squeeze(1) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
