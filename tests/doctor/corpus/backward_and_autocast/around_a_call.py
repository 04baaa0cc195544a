import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
def step(x):
    f(x).backward()  # expect: autocast-around-backward
def epoch():
    with autocast('cpu', torch.bfloat16):
        for x in batches:
            step(x)
