import torch
from torch import nn

from prelude import X

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x)

for strict in (False, True):
    ep = torch.export.export(M(), (X,), strict=strict)
    print(ep.module()(X).dtype)
