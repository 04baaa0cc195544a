import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with torch.no_grad():
    for x in batches:
        with torch.autocast('cuda'):  # expect: weights-cast-in-loop
            model(x)
