import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler = GradScaler()
scaler.step(optimizer, closure)
scaler.update()
