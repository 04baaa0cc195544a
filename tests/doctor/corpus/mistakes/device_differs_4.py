import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
batch = batch.cuda()
def forward(model, batch):
    with torch.autocast('cpu', dtype=torch.float16):  # expect: device-differs
        loss = model(batch)
    scaler.scale(loss).backward()
model.to(device)
