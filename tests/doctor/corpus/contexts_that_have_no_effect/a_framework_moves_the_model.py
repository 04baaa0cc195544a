import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
from accelerate import Accelerator
model = Accelerator().prepare(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in batches:
    optimizer.zero_grad()
    with torch.autocast('cuda', torch.bfloat16):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
