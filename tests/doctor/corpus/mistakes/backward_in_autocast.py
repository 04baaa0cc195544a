import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
from elsewhere import *
with torch.cuda.amp.autocast():
    scaler.scale(loss).backward()  # expect: backward-in-autocast
scaler.step(optimizer)
scaler.update()
