import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
@autocast('cpu', torch.bfloat16)
def step(x):
    loss = f(x)
    loss.backward()  # expect: autocast-around-backward
