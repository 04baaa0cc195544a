import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for batch in batches:
    scaler.scale(f(batch)).backward()
    if max_norm is not None and max_norm > 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    if args.scheduler is not None and args.scheduler != "plateau":
        scheduler.step()  # expect: scheduler-ungated
