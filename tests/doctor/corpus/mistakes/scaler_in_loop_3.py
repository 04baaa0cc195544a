import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def one(x):
    s = GradScaler()  # expect: scaler-in-loop
    s.scale(model(x)).backward()
    s.step(optimizer)
    s.update()
for x in batches:
    one(x)
