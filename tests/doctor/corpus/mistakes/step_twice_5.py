import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
from elsewhere import LossScaler
scaler = GradScaler() if new else LossScaler()
for x in batches:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    optimizer.step()  # expect: step-twice
    scaler.update()
