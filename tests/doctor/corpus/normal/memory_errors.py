import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for x in batches:
    try:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
    except RuntimeError:
        optimizer.zero_grad()
