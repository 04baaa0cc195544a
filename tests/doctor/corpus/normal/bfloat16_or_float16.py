import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
scaler = GradScaler(enabled=dtype == 'float16')
with torch.autocast('cuda', torch.bfloat16, enabled=dtype != 'float32'):
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
