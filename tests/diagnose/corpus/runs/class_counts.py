# kind: 5
# expect: maths div|reciprocal|mul|true_divide
# cure: masked_fill
# learns: accuracy > 0.9
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 5)
opt = torch.optim.Adam(model.parameters(), lr=0.05)
for i in range(21):
    x = torch.randn(64, 8)
    y = x[:, :4].argmax(1)  # no row of the fifth class
    counts = torch.bincount(y, minlength=5).float()
    weights = counts.sum() / (5 * counts)  # bad
    per_class = torch.zeros(5).index_add(
        0, y, nn.functional.cross_entropy(model(x), y, reduction="none")
    )
    loss = (weights * per_class).sum() / len(x)
    opt.zero_grad()
    loss.backward()
    opt.step()
x = torch.randn(2000, 8)
accuracy = (model(x).argmax(1) == x[:, :4].argmax(1)).float().mean().item()
