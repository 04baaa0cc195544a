import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for i, batch in enumerate(batches):
    loss = scaler.scale(model(batch))
    loss.backward()
    if (i + 1) % 4 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: clip-before-unscale
        scaler.step(optimizer)
        scaler.update()
