import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler.scale(loss).backward()
accelerator.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer, max_norm=1.0)
