import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with torch.autocast(device):
    loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
