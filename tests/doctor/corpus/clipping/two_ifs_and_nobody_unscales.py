import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
if use_amp:
    scaler.scale(loss).backward()
else:
    loss.backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: clip-before-unscale
if use_amp:
    scaler.step(optimizer)
else:
    optimizer.step()
