import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler.scale(d_loss).backward()
scaler.unscale_(d_optimizer)
nn.utils.clip_grad_norm_(d.parameters(), 1.0)
scaler.step(d_optimizer)
scaler.scale(g_loss).backward()
nn.utils.clip_grad_norm_(g.parameters(), 1.0)  # expect: clip-before-unscale
scaler.step(g_optimizer)
