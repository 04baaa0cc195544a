import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for batch in batches:
    optimizer.step()
    scheduler.step()
