import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
model.cuda()
with torch.autocast('cpu', torch.float16):  # expect: device-differs
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
