import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def step(optimizer, scaler):
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
