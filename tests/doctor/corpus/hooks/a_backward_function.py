import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
class Limit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad_output):  # expect: hook-on-scaled
        grad_input = grad_output.clone()
        return grad_input.clamp_(-1, 1)
class Square(torch.autograd.Function):
    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[x < 0] = 0
        return grad_input * (2 * x - 1) + grad_output / grad_output.shape[0]
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
