import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
dtype = torch.float16 if old else torch.bfloat16
with autocast('cpu', dtype):
    loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
