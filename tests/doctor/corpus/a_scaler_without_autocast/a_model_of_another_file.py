import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler
from raft import RAFT
net = RAFT(args).cuda()
scaler = GradScaler(enabled=args.mixed)
for x, y in batches:
    optimizer.zero_grad()
    scaler.scale(F.mse_loss(net(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
