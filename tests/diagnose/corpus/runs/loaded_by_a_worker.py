# kind: 6
# expect: data
# tensor: \bx\b
# cure: ^first check this line, the first with inf or NaN when the batch is loaded: \S+:23 in together: x = x\.log\(\)
# step: 3
import torch
from torch import nn


class Lines(torch.utils.data.Dataset):
    def __init__(self):
        self.lines = [f"{i + 1} 1" for i in range(30)]
        self.lines[13] = "0 1"

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        return [float(each) for each in self.lines[i].split()]

def together(items):
    x = torch.tensor(items)
    x = x.log()
    return x, x[:, 1:]


torch.manual_seed(0)
model = nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Lines(), 6, num_workers=1, collate_fn=together)
for x, y in loader:
    loss = (model(x) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
