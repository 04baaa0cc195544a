# kind: 5
# expect: maths log|reciprocal|div|true_divide
# learns: loss < 0.9
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(20, 3)
opt = torch.optim.Adam(model.parameters(), lr=0.05)
for i in range(30):
    docs = torch.poisson(torch.full((32, 20), 0.8 if i != 6 else 0.01))
    y = docs[:, :3].argmax(1)
    frequency = (docs > 0).float().sum(0)
    idf = torch.log(32 / frequency)  # bad
    loss = nn.functional.cross_entropy(model(docs * idf), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
