import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
def step():
    if use_amp:
        scaler.scale(loss).backward()
        return
    optimizer.step()
