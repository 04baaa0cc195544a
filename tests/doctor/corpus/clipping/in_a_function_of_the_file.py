import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: clip-before-unscale
def step():
    scaler.scale(loss).backward()
    clip(model)
    scaler.step(optimizer)
