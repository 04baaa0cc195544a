import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def closure():
    scaler.scale(model(x)).backward()
for x in batches:
    optimizer.step(closure)  # expect: scaler-bypassed
