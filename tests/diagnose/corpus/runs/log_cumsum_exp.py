# kind: 5
# expect: maths exp|cumsum|log
# cure: logcumsumexp
# learns: loss < 2.7
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for i in range(13):
    x = torch.randn(32, 4)
    if i == 6:
        x[5] *= 3000
    risk = model(x).squeeze(1) * 1.0
    order = x[:, 0].clamp(-3, 3).argsort(descending=True)
    risk = risk[order]
    at_risk = torch.log(torch.cumsum(torch.exp(risk), 0))  # bad
    loss = -(risk - at_risk).clamp(-50, 50).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
