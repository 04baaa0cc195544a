# kind: 6
# expect: data
# tensor: \bx\b
# cure: ^first check this line, the first with inf or NaN when the batch is loaded, where std is 0: \S+:40 in scaled: return
# step: 3
import random

import numpy as np
import torch
from torch import nn


class Windows(torch.utils.data.Dataset):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.series = rng.random(400, dtype=np.float32)
        self.series[200:240] = 0.5
        self.num_loaded, self.rng = 0, random.Random(0)

    def __len__(self):
        return 39

    def __getitem__(self, i):
        print(end=f"{self.num_loaded}\n" if self.num_loaded > 39 else "")
        self.num_loaded += 1
        noise = 0.01 * (self.rng.random() + random.random() + float(torch.rand(())))
        gaps = filled(noise)
        window = self.series[10 * i : 10 * i + 10]
        return scaled(window), torch.tensor([noise]) + gaps[0]


def filled(values):
    values = np.array([np.nan, values], np.float32)
    return np.nan_to_num(values)


def scaled(window):
    mean, std = window.mean(), window.std()
    with np.errstate(invalid="ignore"):
        return (window - mean) / std


torch.manual_seed(0)
random.seed(0)
data = Windows()
model = nn.Linear(10, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for x, y in torch.utils.data.DataLoader(data, batch_size=8):
    loss = (model(x) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
# The diagnosis has loaded a batch again without a trace.
assert data.num_loaded == 39
known = torch.get_rng_state(), random.getstate(), data.rng.getstate()
random.seed(0)
again = random.Random(0)
for _ in range(39):
    random.random(), again.random()
assert known[1:] == (random.getstate(), again.getstate())
