import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
class Trainer:
    def __init__(self):
        self.scaler = GradScaler()
    def step(self):
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
    def end(self):
        self.scaler.update()
