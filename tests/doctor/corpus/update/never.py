import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler = GradScaler()
for batch in batches:
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)  # expect: update-missing
