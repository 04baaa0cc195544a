import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with torch.no_grad():
    for epoch in epochs:
        with torch.autocast('cuda'):
            for x in batches:
                model(x)
