import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    loss = model(x)
    if amp:
        scaler.scale(loss).backward()
        scaler.step(optimizer_a)
        step_other(optimizer_c)
        scaler.update()
    else:
        loss.backward()
        optimizer_a.step()
        optimizer_c.step()
    if epoch > 3:
        optimizer_b.step()
