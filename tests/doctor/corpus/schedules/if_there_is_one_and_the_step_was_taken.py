import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for batch in batches:
    scaler.scale(f(batch)).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scheduler is not None and scaler.get_scale() >= scale:
        scheduler.step()
    if args.scheduler == "cosine":
        if not skip_scheduler:
            scheduler.step()
