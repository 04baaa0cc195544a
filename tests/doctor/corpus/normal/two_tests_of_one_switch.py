import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    if scaler is not None:
        scaler.scale(loss).backward()
        if args.clip:
            scaler.unscale_(optimizer)
    else:
        loss.backward()
    if args.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if use_amp:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
