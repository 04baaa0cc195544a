import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
device = torch.device('cuda' if has_cuda else 'cpu')
model.to(device)
with torch.autocast('cuda', dtype=torch.float16):
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
