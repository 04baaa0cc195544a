import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
model = Net().to(torch.bfloat16)  # expect: bf16-parameters
optimizer = torch.optim.AdamW(model.parameters())
scaler = GradScaler()  # expect: scaler-with-bf16
loss = f(model(x))
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
