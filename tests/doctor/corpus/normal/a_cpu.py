import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
scaler = torch.GradScaler('cpu')
def forward(model, batch):
    with torch.autocast('cpu', dtype=torch.float16):
        loss = model(batch)
    scaler.scale(loss).backward()
model.to('cpu')
