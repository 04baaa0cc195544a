import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
    scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
    grads = [p * inv_scale for p in scaled]
    loss = loss + sum(g.norm() for g in grads)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
