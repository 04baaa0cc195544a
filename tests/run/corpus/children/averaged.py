# Two ranks that average their gradients by hand; those of rank 0 are inf once.
import os

import torch
import torch.distributed as dist


def work(rank):
    dist.init_process_group("gloo", f"file://{os.path.abspath('store')}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), torch.inf if step == 1 > rank else 1.0)).mean().backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
    print(f"{model.weight.sum().item():.6f}\n", end="", flush=True)
    dist.barrier()  # else a rank may abort when the other one is gone
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, nprocs=2, start_method="fork")
