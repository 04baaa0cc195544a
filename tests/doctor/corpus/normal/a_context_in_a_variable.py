import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
context = nullcontext() if cpu else torch.autocast('cuda')
for x in batches:
    with context:
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
