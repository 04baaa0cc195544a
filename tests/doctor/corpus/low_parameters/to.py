import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
model = Net().to(device, dtype=torch.float16)  # expect: half-parameters
optimizer = torch.optim.AdamW(model.parameters())
