import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
optimizer = make_optimizer(model.parameters(), lr=0.1)
for x in batches:
    with torch.enable_grad():
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
