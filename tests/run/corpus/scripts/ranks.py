# Data-parallel training, to be started by torchrun or accelerate.
import os
import sys

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(8, 4)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
package = type(scaler).__module__.partition(".")[0]
sys.stdout.write(f"scaler of {package} on rank {os.environ['RANK']}\n")
distributed.destroy_process_group()
