"""The gradients of several blocks of ``accumulate``, put together before they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep._scaler import passes
from halfstep._scaler.gradients import collect, parameters
from halfstep._scaler.iteration import (
    Blocks,
    Iteration,
    Look,
    OptimizerRecord,
    ids_asked,
)
from halfstep._scaler.optimizers import name
from halfstep._scaler.ranks.deciding import Alone, Together
from halfstep._scaler.scalars import is_nonfinite
from halfstep.errors import CallOrderError


def end_blocks(iteration: Iteration, params: list[Tensor], ranks: Alone | Together) -> None:
    """Put the blocks together whose gradients are those of ``params``. Sync: none.

    Raises:
        CallOrderError: There was a ``backward`` after the last block.
    """
    # A wrapper accumulates, and what it wraps steps; or somebody clips all parameters.
    for record, blocks in _sharing(iteration, params):
        _require_no_backward_after(iteration, record, blocks)
        _put_together(iteration, record, blocks, ranks)


def note_versions(iteration: Iteration, params: list[Tensor]) -> None:
    """Note how the gradients are after a block, for all optimizers that share them."""
    for record, blocks in _sharing(iteration, params):
        blocks.num_losses = iteration.num_losses
        blocks.versions = _versions(record.optimizer)


def _sharing(iteration: Iteration, params: list[Tensor]) -> list[tuple[OptimizerRecord, Blocks]]:
    """Return the optimizers with blocks that have one of the parameters."""
    found = [(record, record.blocks) for record in iteration.records() if record.blocks is not None]
    if not found:  # the rule, and a set of thousands takes its time
        return []
    wanted = set(map(id, params))
    return [
        (record, blocks)
        for record, blocks in found
        if not wanted.isdisjoint(map(id, parameters(record.optimizer)))
    ]


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return how often each gradient of an optimizer has been written to."""
    return [param.grad._version for param in parameters(optimizer) if param.grad is not None]


def _require_no_backward_after(
    iteration: Iteration, record: OptimizerRecord, blocks: Blocks
) -> None:
    has_new_loss = iteration.num_losses != blocks.num_losses
    if has_new_loss and _versions(record.optimizer) != blocks.versions:
        raise CallOrderError(
            f"accumulate({name(record.optimizer)}): a loss was scaled and backward() called "
            "after the last block, which adds scaled gradients to unscaled ones. Put every "
            "backward() of the iteration into a block; zero_grad() and update(new_scale=...) "
            "end this one"
        )


def _put_together(
    iteration: Iteration, record: OptimizerRecord, blocks: Blocks, ranks: Alone | Together
) -> None:
    """Make the sum over the good blocks an average over as many as there were."""
    assert blocks.scale is not None
    device = blocks.scale.tensor.device
    is_lost = blocks.bad == blocks.count
    gradients = collect(parameters(record.optimizer))
    rest, _ = iteration.split(gradients)  # a parameter may be in the blocks of another optimizer
    if blocks.bad and not is_lost and not blocks.has_several_losses:
        factor = blocks.count / (blocks.count - blocks.bad)
        passes.multiply_(rest, torch.tensor(factor, device=device))
    if is_lost and not blocks.overflowed:
        blocks.scale.see_loss(torch.full((), torch.inf, device=device))
    if is_lost or not gradients.grads:
        found_inf = torch.full((), float(is_lost), device=device)
    else:  # each block was finite, and their sum may not be
        found_inf = is_nonfinite(passes.measure(gradients, None).total(device))
    asked = ids_asked(parameters(record.optimizer), ranks)
    look = Look(blocks.scale, gradients, {device: found_inf}, asked=asked)
    ranks.agree_on(look)
    iteration.add(look)
    record.looks, record.blocks = [look], None
