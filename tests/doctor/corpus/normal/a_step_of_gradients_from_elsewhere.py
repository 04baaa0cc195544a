import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def take_step(model, scaler, optimizer):
    scaler.step(optimizer)
