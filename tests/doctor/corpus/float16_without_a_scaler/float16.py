import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with autocast('cpu', torch.float16):  # expect: fp16-without-scaler
    loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
