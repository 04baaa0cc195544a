import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
from fairscale.optim import LayerwiseGradientScaler
layer_scaler = LayerwiseGradientScaler(model)
for x in batches:
    model(x).backward()
    layer_scaler.step(optimizer)
