# kind: 6
# expect: data
# tensor: more
# step: 6
# says: not finite in row 9 of 32 \(from 0\)
# says: it has made 1\.running_mean and 1\.running_var inf or NaN, also if its loss
# says: the loss of this step is finite; the call: .*confidence = model\(more\)
# never: step 14
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(1, 20):
    if i == 14:
        model.eval()
    x, more = torch.randn(32, 6), torch.randn(32, 6)
    if i == 6:
        more[9, 2] = float("nan")
    with torch.no_grad():
        confidence = model(more)
    sure = (confidence > 0.8).squeeze(1)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    if i < 14 and sure.any():
        loss = loss + (model(more[sure]) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
