import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
if scaler is None:
    loss.backward()
else:
    scaler.scale(loss).backward()
if scaler is not None:
    scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
if scaler:
    scaler.step(optimizer)
