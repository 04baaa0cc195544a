# kind: a factor of the loss: gradients grow after the first step, which finds room for them
# expect: scale linear|mm|addmm
# cure: ^take a halfstep.GradScaler in place of the factor 32768, .*\nor multiply the loss by \d+(, which was tried)?, and
# says: the loss falls from 1\d\d(\.\d+)? to
# learns: losses[-1] < 5
import torch
from torch import nn

torch.manual_seed(28)
SCALE = 32768.0
model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
head = nn.Linear(128, 1)
weights = [*model.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(weights, lr=0.02, momentum=0.9)
target, losses = torch.randn(16, 1), []
for step in range(1, 61):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.float16):
        out = head(model(x))  # bad
    loss = nn.functional.mse_loss(out.float(), (x @ target) * 3)
    optimizer.zero_grad()
    (loss * SCALE).backward()
    for each in weights:
        each.grad /= SCALE
    nn.utils.clip_grad_norm_(weights, 5.0)
    optimizer.step()
    losses.append(loss.item())
