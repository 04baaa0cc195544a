import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def adamw(model):
    return torch.optim.AdamW(model.parameters())
optimizer = adamw(net)
for x in batches:
    net(x).mean().backward()
    net.zero_grad()  # expect: gradients-dropped
    optimizer.step()
