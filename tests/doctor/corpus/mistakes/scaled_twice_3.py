import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def step(s, o, loss):
    s.scale(loss).backward()  # expect: scaled-twice
    s.step(o)
    s.update()
for x in batches:
    step(scaler, optimizer, scaler.scale(model(x)))
