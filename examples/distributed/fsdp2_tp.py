"""Tensor parallel inside, fully sharded outside: two ranks share each matrix product.

With 2 ranks that is tensor parallelism alone, with 4 both: a mesh of 2 x 2.

Rules to remember:
- `GradScaler()`: the DTensors know the ranks, here those of both dimensions of the mesh.
- Make every parameter a DTensor of the whole mesh, also those that are not split
  (`distribute_module` makes them copies): then the optimizer has parameters of one kind.
- The ranks of a tensor group read the same rows.

Run: torchrun --nproc-per-node 2 examples/distributed/fsdp2_tp.py
Kill it, however you like, and run it again: it goes on from a checkpoint with the same losses.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Checkpoints, Text, count_steps, leave, new_model, report, start
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from halfstep import GradScaler, autocast

PLAN = {
    # q, k and v are one matrix: cut in two its output is no whole heads, so it is put together.
    "blocks.*.attention.qkv": ColwiseParallel(output_layouts=Replicate()),
    "blocks.*.attention.out": RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    "blocks.*.up": ColwiseParallel(use_local_output=False),
    "blocks.*.down": RowwiseParallel(use_local_output=False),
}


def main() -> None:
    options, device = start("fsdp2_tp")
    ranks = dist.get_world_size()
    if ranks % 2:
        raise SystemExit(f"{ranks} processes cannot be paired: start an even number of them")
    text = Text()
    mesh = dist.init_device_mesh(device.type, (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh["data"], mesh["tensor"]
    model = new_model(text).to(device)
    parallelize_module(model, tensor, PLAN)
    distribute_module(model, tensor)
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.008)
    scaler = GradScaler(growth_interval=5)  # the default, 2000, suits longer runs
    checkpoints = Checkpoints(options, model, optimizer, scaler, text)

    for step in count_steps(checkpoints.load() + 1, options.steps):
        inputs, targets = text.draw(device, data.get_local_rank(), data.size())
        optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            logits = model(DTensor.from_local(inputs, tensor, [Replicate()])).to_local()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        report(step, loss / ranks, scaler, optimizer)
        checkpoints.save_after(step)


if __name__ == "__main__":
    main()
    leave()
