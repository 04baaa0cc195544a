import torch.cuda.amp as mixed  # the finding is of the first use
from torch.cuda.amp import common

scaler = mixed.GradScaler()  # expect: deprecated-amp
loss.backward()
torch.cpu.amp.autocast
