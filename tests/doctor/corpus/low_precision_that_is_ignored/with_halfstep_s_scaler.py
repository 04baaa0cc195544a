import torch
from accelerate import Accelerator
from halfstep.integrations.accelerate import use_scaler
accelerator = Accelerator(mixed_precision="fp16", cpu=True)
scaler = use_scaler(accelerator)
accelerator.backward(model(x))
