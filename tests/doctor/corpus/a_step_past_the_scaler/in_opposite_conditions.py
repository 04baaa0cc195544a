import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
if scaler is not None:
    scaler.scale(loss).backward()
if scaler is None:
    optimizer.step()
