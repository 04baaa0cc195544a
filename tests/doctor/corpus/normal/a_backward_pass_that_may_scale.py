import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
with torch.autocast('cuda', dtype=torch.float16):
    loss = model(x)
optimizer.backward(loss)
optimizer.step()
