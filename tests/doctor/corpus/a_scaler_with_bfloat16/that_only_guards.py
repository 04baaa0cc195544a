import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, Static, autocast
scaler = GradScaler(init_scale=1.0, schedule=Static())
with autocast('cpu', torch.bfloat16):
    loss = f(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
