import torch
import torch.nn.functional as F
from halfstep import GradScaler, autocast
import paddle
scaler = paddle.amp.GradScaler()
for x in batches:
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    classifier.step(optimizer)
