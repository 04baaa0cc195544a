import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler = GradScaler(enabled=False)
with autocast('cpu', torch.bfloat16):
    f(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
