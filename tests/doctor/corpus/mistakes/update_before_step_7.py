import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
scaler.scale(first_loss + loss).backward()
scaler.step(first)
scaler.update()  # expect: update-before-step
scaler.update(64.0)
scaler.update(32.0)
scaler.update(16.0)
scaler.update(8.0)
scaler.step(second)
