import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
if fp16:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
else:
    loss.backward()
    optimizer.step()
