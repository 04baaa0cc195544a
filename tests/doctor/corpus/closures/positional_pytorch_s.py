import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler = torch.cuda.amp.GradScaler()
scaler.step(optimizer, closure)  # expect: closure-not-unscaled
scaler.update()
