import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    loss = model(x)
    if amp:
        scaler.scale(loss).backward()
        for each in optimizers:
            scaler.step(each)
        scaler.update()
    else:
        loss.backward()
        optimizer_a.step()
        optimizer_b.step()
