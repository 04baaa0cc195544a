"""Pipeline parallel: each rank has some layers; parts of a batch go through them one by one.

Rules to remember:
- The gradients of a stage say nothing of the other stages: name the ranks that must agree,
  `GradScaler(process_group=...)`.
- The last stage scales the loss, in `loss_fn`. Every stage calls `step` and `update`.
- Embedding and head are one matrix, so the first and the last stage have a copy. Add up its
  gradients before `step`, and tell the scaler (`replicated`), so that the norm counts it once.
- The schedule runs forward and backward in one call, so autocast is inside the stage and the loss.

Run: torchrun --nproc-per-node 2 examples/distributed/pipeline.py
Kill it, however you like, and run it again: it goes on from a checkpoint with the same losses.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import BATCH, CONTEXT, Checkpoints, Text, count_steps, leave, new_model, report, start
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from halfstep import GradScaler, autocast
from train_text import GPT

PARTS = 4  # of a batch


class Stage(nn.Module):
    """The layers of one rank, under the names that they have in the whole model."""

    def __init__(self, gpt: GPT, rank: int, ranks: int) -> None:
        super().__init__()
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        mine = torch.arange(len(gpt.blocks)).tensor_split(ranks)[rank].tolist()
        self.blocks = nn.ModuleDict({str(number): gpt.blocks[number] for number in mine})
        self.positions = gpt.positions if self.is_first else None
        self.tokens = gpt.tokens if self.is_first or self.is_last else None
        self.norm = gpt.norm if self.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or the output of the last stage to the input of the next one or logits."""
        with autocast(x.device.type, dtype=torch.float16):
            if self.is_first:
                x = self.tokens(x) + self.positions.weight[: x.shape[1]]
            for block in self.blocks.values():
                x = block(x)
            return F.linear(self.norm(x), self.tokens.weight) if self.is_last else x


def main() -> None:
    options, device = start("pipeline")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = Text()
    gpt = new_model(text)
    model = Stage(gpt, rank, ranks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.008)
    # growth_interval: the default, 2000, suits longer runs.
    scaler = GradScaler(device.type, growth_interval=5, process_group=dist.group.WORLD)
    ends = dist.new_group([0, ranks - 1])
    if model.tokens is not None:
        scaler.replicated([model.tokens.weight], ends)
    checkpoints = Checkpoints(options, model, optimizer, scaler, text)
    losses: list[Tensor] = []

    def scaled_loss(logits: Tensor, targets: Tensor) -> Tensor:
        with autocast(device.type, dtype=torch.float16):
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / PARTS
        losses.append(loss.detach())
        return scaler.scale(loss)

    # What goes in and out. Without these the schedule tries the stages on made-up data, loss too.
    shape = (BATCH // PARTS, CONTEXT)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    hidden = torch.zeros(*shape, gpt.config.width, device=device, requires_grad=True)
    logits = torch.zeros(*shape, text.vocab, device=device, dtype=torch.float16, requires_grad=True)
    stage = PipelineStage(
        model,
        rank,
        ranks,
        device,
        input_args=tokens if model.is_first else hidden,
        output_args=logits if model.is_last else hidden,
    )
    # The loss is divided by PARTS: divided afterwards, float16 gradients would overflow earlier.
    schedule = Schedule1F1B(stage, PARTS, loss_fn=scaled_loss, scale_grads=False)

    for step in count_steps(checkpoints.load() + 1, options.steps):
        inputs, targets = text.draw(device)
        optimizer.zero_grad()
        losses.clear()
        schedule.step(*([inputs.contiguous()] if model.is_first else []), target=targets)
        if model.tokens is not None:
            dist.all_reduce(model.tokens.weight.grad, group=ends)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        loss = sum(losses, torch.zeros((), device=device))
        report(step, loss, scaler, optimizer)
        checkpoints.save_after(step)


if __name__ == "__main__":
    main()
    leave()
