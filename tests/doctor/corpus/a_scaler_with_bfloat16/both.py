import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler = GradScaler()  # expect: scaler-with-bf16
with autocast('cpu', torch.bfloat16):
    loss = f(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
