import torch
from halfstep import GradScaler, autocast
def hook(parameter):
    if scaler is not None:
        scaler.step(optimizer[parameter][0])
    else:
        optimizer[parameter][0].step()
    optimizer[parameter][1].step()
    optimizer[parameter][0].zero_grad()
def end():
    scaler.update()
for x in batches:
    scaler.scale(model(x)).backward()
