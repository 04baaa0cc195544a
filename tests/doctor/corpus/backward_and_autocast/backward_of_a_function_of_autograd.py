import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
class Double(torch.autograd.Function):
    @staticmethod
    @torch.autocast('cpu')
    def backward(ctx, grad):
        return Inner.backward(ctx, grad)
