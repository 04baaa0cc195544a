import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with torch.cuda.amp.autocast():  # expect: fp16-without-scaler
    loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
