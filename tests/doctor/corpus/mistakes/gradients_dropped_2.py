import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    if True:
        loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.zero_grad()  # expect: gradients-dropped
    optimizer.step()
