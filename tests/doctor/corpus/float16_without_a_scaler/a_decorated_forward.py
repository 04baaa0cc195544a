import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
class Net(nn.Module):
    @torch.autocast('cuda', dtype=torch.float16)  # expect: fp16-without-scaler
    def forward(self, x):
        return self.body(x)
def train():
    Net()(x).sum().backward()
    optimizer.step()
