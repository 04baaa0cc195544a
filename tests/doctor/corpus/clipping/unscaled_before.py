import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
