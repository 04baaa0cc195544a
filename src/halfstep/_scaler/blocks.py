"""The gradients of several blocks of ``accumulate``, put together before they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep._scaler import passes, scalars
from halfstep._scaler.gradients import collect, parameters
from halfstep._scaler.iteration import Blocks, GradientCheck, Iteration, Step
from halfstep._scaler.optimizers import name
from halfstep._scaler.ranks.agreement import Alone, Together
from halfstep.errors import CallOrderError


def end_blocks(iteration: Iteration, params: list[Tensor], ranks: Alone | Together) -> None:
    """Put the blocks together whose gradients are those of ``params``. Sync: none.

    Raises:
        CallOrderError: There was a ``backward`` after the last block.
    """
    # A wrapper accumulates, and what it wraps steps; or somebody clips all parameters.
    for blocks in _sharing(iteration, params):
        _require_no_backward_after(iteration, blocks)
        _put_together(iteration, blocks, ranks)


def note_versions(iteration: Iteration, params: list[Tensor]) -> None:
    """Note how the gradients are after a block, for all optimizers that share them."""
    for blocks in _sharing(iteration, params):
        blocks.num_losses = iteration.num_losses
        blocks.versions = _versions(blocks.optimizer)


def _sharing(iteration: Iteration, params: list[Tensor]) -> list[Blocks]:
    """Return the blocks of the optimizers that have one of the parameters."""
    wanted = set(map(id, params))
    return [
        blocks
        for blocks in iteration.blocks.values()
        if not wanted.isdisjoint(map(id, parameters(blocks.optimizer)))
    ]


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return how often each gradient of an optimizer has been written to."""
    return [param.grad._version for param in parameters(optimizer) if param.grad is not None]


def _require_no_backward_after(iteration: Iteration, blocks: Blocks) -> None:
    has_new_loss = iteration.num_losses != blocks.num_losses
    if has_new_loss and _versions(blocks.optimizer) != blocks.versions:
        raise CallOrderError(
            f"accumulate({name(blocks.optimizer)}): a loss was scaled and backward() called "
            "after the last block, which adds scaled gradients to unscaled ones. Put every "
            "backward() of the iteration into a block; zero_grad() and update(new_scale=...) "
            "end this one"
        )


def _put_together(iteration: Iteration, blocks: Blocks, ranks: Alone | Together) -> None:
    """Make the sum over the good blocks an average over as many as there were."""
    assert blocks.scale is not None
    optimizer, device = blocks.optimizer, blocks.scale.tensor.device
    is_lost = blocks.bad == blocks.count
    gradients = collect(parameters(optimizer))
    rest, _ = iteration.split(gradients)  # a parameter may be in the blocks of another optimizer
    if blocks.bad and not is_lost and not blocks.has_several_losses:
        passes.multiply_(rest, blocks.count / (blocks.count - blocks.bad))
    if is_lost and not blocks.overflowed:
        blocks.scale.mark_loss_bad()
    if is_lost or not gradients.grads:
        found_inf = torch.full((), float(is_lost), dtype=torch.float32, device=device)
    else:  # each block was finite, and their sum may not be
        found_inf = scalars.flag_nonfinite(passes.measure(gradients, None).total(device), device)
    asked = frozenset(map(id, parameters(optimizer))) if ranks.is_together else frozenset[int]()
    check = GradientCheck(blocks.scale, gradients, {device: found_inf}, asked=asked)
    ranks.agree_on(check)
    iteration.add(check)
    del iteration.blocks[id(optimizer)]
    iteration.steps[id(optimizer)] = Step(optimizer, blocks.scale, checks=[check])
