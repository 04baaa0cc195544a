import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler.step(optimizer, closure)
