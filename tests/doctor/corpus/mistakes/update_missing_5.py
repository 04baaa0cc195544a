import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
def main():
    optimizer, scaler = create()
    def step():
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)  # expect: update-missing
    save(scaler)
    timed(step)
