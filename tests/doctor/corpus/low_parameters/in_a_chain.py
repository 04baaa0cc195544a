import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
model = Net().cuda().half().train()  # expect: half-parameters
optimizer = torch.optim.AdamW(model.parameters())
