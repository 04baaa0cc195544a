import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def step(s, o, loss):
    s.scale(loss).backward()
    s.step(o)
    s.step(optimizer)  # expect: step-twice
    s.update()
for x in batches:
    step(scaler, optimizer, model(x))
