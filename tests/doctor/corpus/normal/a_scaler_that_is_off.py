import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
scaler = GradScaler(enabled=False)
loss = model(x)
loss.backward()
scaler.step(optimizer)
scaler.update()
