# kind: 1
# expect: data
# tensor: lr of AdamW
# cure: ^warm = np\.float64\(step\) / max\(np\.float64\(WARM_UP\), 1\)
# says: LambdaLR multiplies it by rate\(0\), which is nan: `np\.float64\(WARM_UP\)` is 0 there
# never: past its end
# learns: loss < 2
# step: 1
import numpy as np
import torch
from torch import nn

WARM_UP, STEPS = 0, 40


def warmed(step):
    with np.errstate(all="ignore"):
        warm = np.float64(step) / np.float64(WARM_UP)
    return np.minimum(warm, 1.0)


def rate(step):
    return warmed(step) * (1 + np.cos(np.pi * step / STEPS)) / 2


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.AdamW(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, [rate])
for _ in range(STEPS):
    x = torch.randn(64, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
