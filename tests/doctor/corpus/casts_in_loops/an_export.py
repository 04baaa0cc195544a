import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
model.eval()
for name, shape in shapes.items():
    with torch.no_grad(), torch.autocast("cuda"):
        torch.onnx.export(model, torch.zeros(shape), f"{name}.onnx")
        export_engine(model, name)
        model.state_dict()
