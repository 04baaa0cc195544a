import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
x = x.half()
optimizer = torch.optim.AdamW(model.parameters())
