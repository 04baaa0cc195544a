import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
class Trainer:
    def step(self, x):
        for x in self.batches:
            loss = self.net(x)
            if self.sam and x.step >= self.begin:
                loss.backward()
            else:
                self.scaler.scale(loss).backward()
            if self.clips and not (self.sam is not None and x.step >= self.begin):
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            if self.sam and x.step >= self.begin:
                self.sam.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
