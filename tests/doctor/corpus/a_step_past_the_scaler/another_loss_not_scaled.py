import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler.scale(d_loss).backward()
scaler.step(d_optimizer)
g_loss.backward()
g_optimizer.step()
