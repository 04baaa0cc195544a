# kind: 5
# expect: maths _ctc_loss
# says: rows 2 and 4 of 6 \(from 0\) is inf: the labels need \d+ and \d+ frames, and there are 10 and 10
# cure: zero_infinity=True
# learns: loss.isfinite()
# step: 6
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 6)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(1, 10):
    x = torch.randn(10, 6, 8)
    sizes, y = torch.randint(3, 6, (6,)), torch.randint(1, 6, (6, 14))
    if step == 6:
        sizes[2], sizes[4] = 14, 12
    loss = F.ctc_loss(model(x).log_softmax(-1), y, torch.full((6,), 10), sizes)  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
