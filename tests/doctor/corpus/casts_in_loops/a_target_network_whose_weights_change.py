import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    with torch.no_grad(), torch.autocast('cuda'):
        target = average(x)
    f(x, target).backward()
