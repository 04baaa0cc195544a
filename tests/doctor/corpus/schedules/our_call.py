import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for batch in batches:
    scaler.scale(f(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    if scaler.outcome(optimizer).taken:
        scheduler.step()
