import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
from timm.utils import dispatch_clip_grad
for x in batches:
    scaler.scale(loss).backward()
    dispatch_clip_grad(parameters, value=1.0)  # expect: clip-before-unscale
    scaler.step(optimizer)
    scaler.update()
