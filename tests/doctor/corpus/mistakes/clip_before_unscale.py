import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def take_step(model, scaler, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: clip-before-unscale
    scaler.step(optimizer)
