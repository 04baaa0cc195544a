import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
weight_scheduler = LinearScheduler(0.1, 1.0, steps=100)
scheduler = WarmupCosine(optimizer, steps=100)
for batch in batches:
    scaler.scale(f(batch) * weight_scheduler.value).backward()
    scaler.step(optimizer)
    scaler.update()
    weight_scheduler.step()
    scheduler.step()  # expect: scheduler-ungated
