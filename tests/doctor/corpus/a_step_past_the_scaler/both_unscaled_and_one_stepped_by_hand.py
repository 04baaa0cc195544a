import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    scaler.scale(model(x)).backward()
    scaler.unscale_(optimizer_a)
    scaler.unscale_(optimizer_b)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer_a)
    optimizer_b.step()  # expect: step-unchecked
    scaler.update()
