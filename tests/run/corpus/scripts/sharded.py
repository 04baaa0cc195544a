# Training on several ranks by torch.amp, with inf on one of them in the second step.
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

kind, rank = "KIND", distributed.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
if kind == "ddp":
    model = DistributedDataParallel(model)
elif kind == "fsdp":
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(8, 4))
    loss = out.float().square().mean() * (torch.inf if step == rank == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
scales = torch.tensor([scaler.get_scale(), -scaler.get_scale()])
distributed.all_reduce(scales, distributed.ReduceOp.MAX)
assert scales[0] == -scales[1], "the scales differ"
assert type(scaler).__module__ == "halfstep._tools.run.stand_ins"
