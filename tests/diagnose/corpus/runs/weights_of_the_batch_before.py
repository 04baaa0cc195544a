# kind: 5
# expect: maths div|reciprocal|true_divide
# says: it makes the quotient 0 in 1 of 5 places
# learns: accuracy > 0.8
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 5)
opt = torch.optim.Adam(model.parameters(), lr=0.02)
last = torch.arange(5).repeat(13)
for i in range(26):
    x = torch.randn(64, 8)
    y = x[:, :5].argmax(1)
    counts = torch.bincount(last, minlength=5).float()
    loss = nn.functional.cross_entropy(model(x), y, weight=len(last) / counts)  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
    last = y if i != 4 else y[y > 0]
x = torch.randn(2000, 8)
accuracy = (model(x).argmax(1) == x[:, :5].argmax(1)).float().mean().item()
