import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
from accelerate import Accelerator
with autocast('cpu', torch.float16):
    loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
