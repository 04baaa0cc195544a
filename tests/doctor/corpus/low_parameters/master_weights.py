import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
model.bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
halfstep.master_weights(optimizer)
