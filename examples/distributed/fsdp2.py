"""Fully sharded (FSDP2): each rank keeps a part of every parameter and gathers a block to run it.

Rules to remember:
- `GradScaler()`: the gradients are DTensors, and a DTensor knows the ranks that hold its parts.
  Each rank sees the inf of its own part only; the scaler makes sure that all ranks skip.
- `max_norm` is the norm over the parts of all ranks.
- Parameters stay float32, and autocast casts the gathered weights: no MixedPrecisionPolicy.
- Make the optimizer after `fully_shard`.

Run: torchrun --nproc-per-node 2 examples/distributed/fsdp2.py
Kill it, however you like, and run it again: it goes on from a checkpoint with the same losses.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Checkpoints, Text, count_steps, leave, new_model, report, start
from torch.distributed.fsdp import fully_shard

from halfstep import GradScaler, autocast


def main() -> None:
    options, device = start("fsdp2")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = Text()
    model = new_model(text).to(device)
    mesh = dist.init_device_mesh(device.type, (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # what is in no block: embeddings and the last norm
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.008)
    scaler = GradScaler(growth_interval=5)  # the default, 2000, suits longer runs
    checkpoints = Checkpoints(options, model, optimizer, scaler, text)

    for step in count_steps(checkpoints.load() + 1, options.steps):
        inputs, targets = text.draw(device, rank, ranks)
        optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        report(step, loss / ranks, scaler, optimizer)
        checkpoints.save_after(step)


if __name__ == "__main__":
    main()
    leave()
