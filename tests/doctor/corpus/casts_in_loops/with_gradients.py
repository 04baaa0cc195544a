import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    with torch.autocast('cuda'):
        loss = model(x)
