import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for epoch in epochs:
    scaler = GradScaler()
    for x in batches:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
