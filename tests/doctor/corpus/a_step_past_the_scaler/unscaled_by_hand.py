import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler.scale(loss).backward()
for p in model.parameters():
    p.grad.div_(scaler.get_scale())
optimizer.step()
