import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer_a)
    scaler.unscale_(optimizer_b)
    optimizer_b.step()  # expect: step-unchecked
    scaler.update()
