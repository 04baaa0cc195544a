import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
with torch.no_grad():
    for x in batches:
        with torch.autocast("cuda", enabled=True):
            spectrum = torch.stft(x.float(), 512)
            power = spectrum.abs().square().clamp(1e-5)
            frames = resample(power, 2)
