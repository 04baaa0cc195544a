# kind: 5
# expect: maths _ctc_loss
# says: row 1 of 3 \(from 0\) is inf: the labels need 11 frames, and there are 9
# cure: zero_infinity=True
# step: 3
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 6)
criterion = nn.CTCLoss(reduction="sum")
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(1, 5):
    x, frames, sizes = torch.randn(9, 3, 8), torch.tensor([9, 9, 8]), torch.tensor([3, 6, 4])
    y = torch.tensor([1, 2, 3, *([5] * 6 if step == 3 else [1, 2] * 3), 1, 2, 3, 4])
    loss = criterion(model(x).log_softmax(-1), y, frames, sizes) / 3  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
