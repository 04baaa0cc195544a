import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
optimizer = torch.optim.AdamW(model.parameters())
model.half()  # expect: half-parameters
