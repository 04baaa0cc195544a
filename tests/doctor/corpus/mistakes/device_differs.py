import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
model = model.to('cpu')
with torch.autocast('cuda', dtype=torch.float16):  # expect: device-differs
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
