import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with torch.no_grad(), autocast('cpu', torch.float16):
    f(x)
loss.backward()
optimizer.step()
