import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
import torchvision
class Trainer:
    def __init__(self):
        self.model = torchvision.models.resnet18().cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scaler = GradScaler()  # expect: scaler-without-autocast
    def step(self, x, y):
        self.optimizer.zero_grad()
        self.scaler.scale(F.cross_entropy(self.model(x), y)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
