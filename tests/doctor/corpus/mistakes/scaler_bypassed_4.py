import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
class Engine:
    def run(self, x):
        self.scaler.scale(self.model(x)).backward()

    def finish(self):
        self.optimizer.step()  # expect: scaler-bypassed
        self.scaler.update()
