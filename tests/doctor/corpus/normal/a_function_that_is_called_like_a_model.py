import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
from checkpoints import save_model
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    save_model(loss)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
