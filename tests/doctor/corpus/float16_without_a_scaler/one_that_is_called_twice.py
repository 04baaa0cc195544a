import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
def train(dtype):
    with autocast('cpu', dtype):
        loss = f(x)
    loss.backward()
    optimizer.step()
train(torch.float16)
train(torch.bfloat16)
