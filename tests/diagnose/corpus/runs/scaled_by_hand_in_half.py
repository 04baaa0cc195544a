# kind: 5
# expect: scale
# says: the loss (falls|rises) from \d
# cure: ^take a halfstep.GradScaler in place of the factor 32768, .*\nor multiply the loss by \d+(, which was tried)?, and
# step: 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_scale = torch.tensor(2.0**15)
for i in range(1, 11):
    x = torch.randn(64, 16)
    loss = nn.functional.cross_entropy(model(x.half()) * 8, x.argmax(1) % 4, reduction="sum")
    scaled = loss_scale * loss.float()
    optimizer.zero_grad()
    scaled.backward()
    for p in model.parameters():
        p.grad.div_(loss_scale)
    optimizer.step()
