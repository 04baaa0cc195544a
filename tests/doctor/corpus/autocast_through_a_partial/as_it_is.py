import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
from functools import partial
half = partial(autocast, 'cpu', torch.float16)
with half():  # expect: fp16-without-scaler
    loss = F.mse_loss(model(x), y)
loss.backward()
optimizer.step()
