import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def step(model, batch, scaler):
    with torch.autocast('cuda', torch.bfloat16, enabled=args.bf16):
        loss = model(batch)
    scaler.scale(loss).backward()
