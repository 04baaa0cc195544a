import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
criterion = nn.BCELoss() if args.plain else nn.BCEWithLogitsLoss()
with torch.autocast("cuda"):
    loss = criterion(model(x), y)
    with torch.autocast("cuda", enabled=False):
        loss = F.binary_cross_entropy(model(x).float(), y)
with torch.autocast("cpu"):
    loss = F.binary_cross_entropy(model(x), y)
with torch.autocast("cuda", enabled=amp):
    if amp:
        loss = F.binary_cross_entropy_with_logits(model(x), y)
    else:
        loss = F.binary_cross_entropy(model(x).sigmoid(), y)
use_amp = args.amp
with torch.autocast("cuda", enabled=use_amp):
    if not use_amp:
        loss = F.binary_cross_entropy(model(x).sigmoid(), y)
