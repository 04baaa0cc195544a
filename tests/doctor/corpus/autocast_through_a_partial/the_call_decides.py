import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
from functools import partial
half = partial(autocast, 'cpu', dtype=torch.float16)
with half(dtype=torch.bfloat16):
    loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
