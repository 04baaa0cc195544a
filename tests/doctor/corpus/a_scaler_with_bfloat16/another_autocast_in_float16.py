import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler = GradScaler()
with autocast('cpu', torch.bfloat16):
    f(x)
with autocast('cpu', torch.float16):
    f(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
