import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for epoch in epochs:
    for batch in batches:
        scaler.scale(f(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
