import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
context = torch.autocast('cpu') if lower else nullcontext()
with torch.enable_grad(), context:
    loss.backward()  # expect: backward-in-autocast
