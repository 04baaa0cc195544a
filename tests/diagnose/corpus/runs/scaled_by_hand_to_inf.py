# kind: 5
# expect: scale mul
# says: `mul` in the forward pass overflowed float16, because the loss scale \(2\^15\) is too large
# cure: ^take a halfstep.GradScaler in place of the factor 32768, .*\nor multiply the loss by \d+(, which was tried)?, and
# step: 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(1, 11):
    x = torch.randn(64, 16).half()
    loss = nn.functional.mse_loss(model(x).squeeze(1), x.sum(1)) * 2
    optimizer.zero_grad()
    (loss * 2**15).backward()  # bad
    for p in model.parameters():
        p.grad /= 2**15
    optimizer.step()
