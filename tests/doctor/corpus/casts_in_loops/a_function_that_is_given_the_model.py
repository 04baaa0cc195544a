import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    for x in batches:
        with torch.autocast("cuda"):  # expect: weights-cast-in-loop
            y = sliding_window(x, model)
