import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer_a)
    scaler.unscale_(optimizer_b)
    norm = nn.utils.clip_grad_norm_(model.b.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer_b.step()
    scaler.update()
