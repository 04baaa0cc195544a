import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
teacher.half()
optimizer = torch.optim.AdamW(model.parameters())
