import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
class Trainer:
    def __init__(self):
        self.scaler = GradScaler()
    def train_step(self, x):
        self.optimizer.zero_grad()
        with autocast('cuda'):
            loss = self.model(x)
        scaler = find_scaler(self)
        scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
