import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler
net = nn.Linear(4, 4)
net = fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.float16))
scaler = GradScaler()
for x, y in batches:
    optimizer.zero_grad()
    scaler.scale(F.mse_loss(net(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
