import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with autocast('cpu', torch.bfloat16):
    loss = f(x)
loss.backward()
