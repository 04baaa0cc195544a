import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
decay = torch.optim.lr_scheduler.StepLR(optimizer, 3)
for batch in batches:
    scaler.scale(f(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    decay.step()  # expect: scheduler-ungated
