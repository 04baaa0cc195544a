import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for x in batches:
    with autocast('cuda'):
        loss = model(x).mean()
    loss.backward()
    option.step()
