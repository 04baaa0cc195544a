"""Data parallel: each rank has the whole model and trains on its rows of every batch.

Rules to remember:
- `GradScaler()`, as on one device: DistributedDataParallel adds up the gradients in backward, so
  that all ranks see the same inf and decide the same. The scaler sends nothing.
- Clip in `scaler.step(optimizer, max_norm=...)`: the norm is that of the added-up gradients.
- The loss of a rank is that of its rows; only for printing the ranks' losses are added up.

Run: torchrun --nproc-per-node 2 examples/distributed/ddp.py
Kill it, however you like, and run it again: it goes on from a checkpoint with the same losses.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Checkpoints, Text, count_steps, leave, new_model, report, start
from torch.nn.parallel import DistributedDataParallel

from halfstep import GradScaler, autocast


def main() -> None:
    options, device = start("ddp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = Text()
    model = DistributedDataParallel(new_model(text).to(device))
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
