import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
model.half()
masters = [p.clone().float() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1)
