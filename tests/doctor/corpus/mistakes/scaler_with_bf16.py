import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
scaler = GradScaler(enabled=args.amp)  # expect: scaler-with-bf16
with torch.autocast('cuda', torch.bfloat16, enabled=args.amp):
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
