import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def step(s, o, loss):
    s.scale(loss).backward()
    clip(s, o)
    s.unscale_(o)  # expect: unscale-twice
    s.step(o)
    s.update()
for x in batches:
    step(scaler, optimizer, model(x))
def clip(s, o):
    s.unscale_(o)
