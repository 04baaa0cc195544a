import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for p in model.parameters():
    p.register_hook(lambda grad: torch.clamp(grad, -0.1, 0.1))
with autocast("cuda", torch.bfloat16):
    loss = model(x).sum()
loss.backward()
optimizer.step()
