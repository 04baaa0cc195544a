import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
scaler = torch.cuda.amp.GradScaler()  # expect: deprecated-amp
scaler.step(optimizer, closure)  # expect: closure-not-unscaled
scaler.update()
