import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
class Base:
    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # expect: clip-before-unscale
class Trainer(Base):
    def train_step(self, x):
        self.scaler.scale(self.model(x)).backward()
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
