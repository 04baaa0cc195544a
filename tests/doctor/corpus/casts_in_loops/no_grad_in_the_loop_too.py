import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for x in batches:
    with torch.inference_mode(), torch.cuda.amp.autocast():  # expect: deprecated-amp weights-cast-in-loop
        model(x)
