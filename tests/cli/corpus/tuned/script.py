# Models to tune, and what may be wrong with them.
import torch
from helper import Overflows
from torch import nn

calls = 0

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Overflows(8, 8), nn.Linear(8, 4))
    return model, [torch.randn(4, 8)], loss_fn

def loss_fn(model, batch):
    return model(batch).float().square().mean()

def stops():
    def loss_fn(model, batch):
        global calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return model(batch).float().square().mean()
    return *make()[:2], loss_fn

def late():
    model, batches, _ = make()
    weight = torch.full((1, 4), 1e6)
    return model, batches, lambda m, batch: nn.functional.linear(m(batch), weight).mean()

def one():
    return make()[0]

def two():
    return make()[:2]

def half():
    return make()[0].half(), [torch.ones(4, 8)], None

def no_batches():
    return make()[0], [], None
