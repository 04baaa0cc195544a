import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with autocast('cpu', enabled=False):
    loss.backward()
with autocast('cpu'):
    with autocast('cpu', enabled=False):
        loss.backward()
