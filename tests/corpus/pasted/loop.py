# A loop by its parts.
from contextlib import nullcontext
import torch
import torch.nn.functional as F
import halfstep
from torch import nn

torch.manual_seed(0)
x = torch.randn(16, 8)
model = {model}
{before}
optimizer = {optimizer}
scaler = {scaler}
losses = []
with {record}, {around}:
    for n in range({steps}):
        with {autocast}:
            loss = {loss}
        scaler.scale(loss).backward()
        {step}
        optimizer.zero_grad()
        losses.append(loss.item())
