import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
dtype = find()
with autocast('cpu', dtype):
    loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
