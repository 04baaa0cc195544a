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
        self.g_scaler.scale(loss).backward()  # expect: loss-not-scaled
        self.d_scaler.unscale_(self.g_opt)
        clip(self.model)
        self.g_scaler.step(self.g_opt)
        self.g_scaler.update()
        self.d_scaler.update()
