import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler.scale(loss).backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: clip-before-unscale
scaler.step(optimizer)
scaler.update()
