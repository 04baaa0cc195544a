import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    scaler.scale(model(x)).backward()
    for p in model.parameters():
        p.grad.data.clamp_(-1, 1)  # expect: clip-before-unscale
    scaler.step(optimizer)
    scaler.update()
