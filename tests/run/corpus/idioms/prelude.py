"""What the idioms have in common."""

import torch
from torch import nn

torch.manual_seed(0)
X = torch.randn(8, 4)


def model_and_sgd(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of(model, x=X):
    return model(x).square().mean()


def show(model, scaler):
    weights = sum(p.double().sum().item() for p in model.parameters())
    print(weights, scaler.get_scale(), scaler.state_dict().get("_growth_tracker"))
