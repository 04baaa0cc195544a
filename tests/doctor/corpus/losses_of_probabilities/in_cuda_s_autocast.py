import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
criterion = nn.BCELoss()
for x, y in batches:
    with torch.cuda.amp.autocast():
        p = torch.sigmoid(model(x))
        loss = criterion(p, y)  # expect: bce-in-autocast
