import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
groups = [{'params': model.parameters()}]
model.half()  # expect: half-parameters
optimizer = torch.optim.SGD(groups, lr=0.1)
