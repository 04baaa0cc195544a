import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with torch.no_grad(), torch.autocast('cuda'):
    for x in batches:
        with torch.autocast('cuda'):
            model(x)
