import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
lowered = torch.cuda.amp.autocast if amp else nullcontext
with lowered():
    loss = model(x)
    loss.backward()  # expect: backward-in-autocast
