import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
class Trainer:
    def unscale(self):
        self.scaler.unscale_(self.optimizer)
    def step(self):
        self.scaler.scale(loss).backward()
        self.unscale()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
