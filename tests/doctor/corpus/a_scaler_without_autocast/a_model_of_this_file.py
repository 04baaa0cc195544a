import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
class Net(nn.Module):
    def forward(self, x):
        return x
def train(batches, device):
    net = nn.DataParallel(Net().to(device))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")  # expect: scaler-without-autocast
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(net(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
