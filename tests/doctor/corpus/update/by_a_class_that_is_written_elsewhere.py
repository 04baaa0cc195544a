import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
class Trainer(Base):
    def __init__(self):
        self.scaler = GradScaler()
    def step(self):
        self.scaler.step(self.optimizer)
