import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
model = Net().bfloat16().float()
optimizer = torch.optim.AdamW(model.parameters())
scaler = GradScaler()
loss = f(model(x))
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
