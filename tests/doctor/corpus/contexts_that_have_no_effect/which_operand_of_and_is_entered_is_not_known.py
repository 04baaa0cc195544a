import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
optimizer = torch.optim.SGD(model.cuda().parameters(), lr=0.1)
for x in batches:
    optimizer.zero_grad()
    with torch.autocast('cuda', torch.float16) and torch.enable_grad():
        loss = model.cuda()(x).sum()
    loss.backward()
    optimizer.step()
