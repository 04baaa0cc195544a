# Usage: ranks.py fork|forkserver: two ranks, which are started here.
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def work(rank):
    dist.init_process_group("gloo", f"file://{os.path.abspath('store')}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4) + rank).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    if rank == 0:
        print(model.module.weight.sum().item(), flush=True)
    dist.barrier()  # else a rank may abort when the other one is gone
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, nprocs=2, start_method=sys.argv[1])
