import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
model = Net().to(torch.bfloat16)  # expect: bf16-parameters
optimizer = torch.optim.AdamW(model.parameters())
other = torch.optim.SGD(head.parameters())
scaler = GradScaler()
loss = f(model(x))
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.step(other)
scaler.update()
