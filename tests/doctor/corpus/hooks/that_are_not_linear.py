import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
for p in model.parameters():
    p.register_hook(lambda grad: torch.clamp(grad, -0.1, 0.1))  # expect: hook-on-scaled
    p.register_hook(lambda g: g + 1e-4 * p)  # expect: hook-on-scaled
    p.register_hook(lambda g: g.add(torch.randn_like(g), alpha=1e-7))  # expect: hook-on-scaled
    p.register_hook(lambda g: g / (g.norm() + 1e-6))  # expect: hook-on-scaled
def limit(p):
    p.grad.clamp_(-1, 1)
def noisy(module, into, out):
    return tuple(g + noise for g in into)
model.weight.register_post_accumulate_grad_hook(limit)  # expect: hook-on-scaled
model.register_full_backward_hook(noisy)  # expect: hook-on-scaled
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
