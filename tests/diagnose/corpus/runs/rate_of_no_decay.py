# kind: 1
# expect: data
# tensor: lr of SGD
# cure: ^return \(np\.float32\(step\) - WARM\) / max\(\(?TOTAL - WARM\)?, 1\)
# says: `TOTAL - WARM` is 0 there
# step: 9
import numpy as np
import torch
from torch import nn

TOTAL, WARM = np.float32(8), np.float32(8)


def progress(step):
    return (np.float32(step) - WARM) / (TOTAL - WARM)


def rate(step):
    if step < WARM:
        return step / WARM
    with np.errstate(all="ignore"):
        return 0.5 * (1 + np.cos(np.pi * progress(step)))


torch.manual_seed(0)
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, rate)
for _ in range(12):
    x = torch.randn(64, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
