# kind: 5
# expect: maths _ctc_loss
# says: row 0 of 4 \(from 0\) is inf: the labels need \d frames, and there are 2
# cure: zero_infinity=True
# step: 2
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 6)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(1, 5):
    x, y = torch.randn(9, 4, 8), torch.randint(1, 6, (4, 4))
    frames, sizes = torch.full((4,), 9), torch.full((4,), 4)
    frames[0] = 2 if step == 2 else 9  # a clip that was cut
    logs = model(x).log_softmax(-1)
    losses = F.ctc_loss(logs, y, frames, sizes, reduction="none")  # bad
    loss = (losses / sizes).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
