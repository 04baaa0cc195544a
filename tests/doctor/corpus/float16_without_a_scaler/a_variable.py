import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
dtype = torch.float16
with autocast('cpu', dtype):  # expect: fp16-without-scaler
    loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
