import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
model.bfloat16()  # expect: bf16-parameters
optimizer = torch.optim.AdamW(model.parameters())
