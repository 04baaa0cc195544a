# kind: 3
# expect: maths log
# says: idf.* comes from it, and was made before
# step: 6
import torch
from torch import nn

torch.manual_seed(0)
seen = (torch.rand(200, 12) < 0.3).float()
seen[:, 7] = 0
idf = -torch.log(seen.mean(0))  # bad
model = nn.Linear(3, 1)
opt = torch.optim.Adam(model.parameters(), 0.01)
for i in range(12):
    words = torch.randint(0, 7, (16, 3))
    if i > 4:
        words[0, 0] = 7
    x = idf[words]
    loss = (model(x) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
