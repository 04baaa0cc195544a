import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    loss.backward()  # expect: loss-not-scaled
    scaler.step(optimizer)
    scaler.update()
