import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
layer.scale(loss).backward()
optimizer.step()
