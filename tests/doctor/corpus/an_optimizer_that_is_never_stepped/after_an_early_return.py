import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
def step(x, amp):
    loss = model(x)
    if amp:
        scaler.scale(loss).backward()
        scaler.step(optimizer_g)
        scaler.update()
        return
    loss.backward()
    optimizer_g.step()
    optimizer_d.step()  # expect: step-missing
