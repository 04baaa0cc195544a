import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for batch in batches:
    scaler.scale(f(batch)).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    step_scheduler = scaler.get_scale() >= scale
    if step_scheduler:
        scheduler.step()
