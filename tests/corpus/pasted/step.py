# A step by its parts.
import torch
import halfstep
from torch import nn

torch.manual_seed(0)
x = torch.randn(4, 8).abs()
{setup}


def step():
    with {autocast}:
        y = model(x)
    loss = {loss}
    {backward}
    return loss
