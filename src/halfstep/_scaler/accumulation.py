"""Gradients of several losses, each judged alone before it is added to the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep._pytorch.distributed import is_dtensor, local_part
from halfstep._scaler.blocks import note_versions
from halfstep._scaler.engine import Engine
from halfstep._scaler.gradients import NONE, parameters
from halfstep._scaler.iteration import Blocks, GradientCheck, Iteration, Stage, Step
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.optimizers import name
from halfstep._scaler.step import gather, refuse_half, unscale_
from halfstep.errors import CallOrderError

Stash: TypeAlias = list[tuple[Tensor, Tensor | None]]
"""Parameters and the gradients they had."""


@contextmanager
def accumulate(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Add the gradients of this block to the earlier ones, unscaled, unless they are not finite.

    As long as all blocks so far were bad, the gradients of the last one stay: they show where it
    was bad. See :meth:`halfstep.GradScaler.accumulate`.
    """
    block = _Block(engine.iteration, optimizer)
    blocks = block.root.blocks.get(id(optimizer))
    if blocks is None:
        _require_untouched(block.root, optimizer)
        blocks = Blocks(optimizer)
    has_good = blocks.bad < blocks.count
    earlier = [(param, param.grad) for param in parameters(optimizer)]
    for param, _ in earlier:
        param.grad = None
    bad_losses = _take_bad_losses(engine)
    engine.iteration = block
    try:
        yield
        is_good = _judge(engine, block, blocks)
        if has_good and is_good:
            _add(earlier)
        elif has_good:
            _give_back(earlier)
    except BaseException:
        _give_back(earlier)
        _take_bad_losses(engine)
        raise
    finally:
        if engine.iteration is block:
            engine.iteration = block.around
            for scale, is_bad in bad_losses:
                assert scale.live is not None
                scale.live.see_loss_(1.0 / (1.0 - is_bad))
    block.join()
    block.root.blocks[id(optimizer)] = blocks
    note_versions(block.root, list(parameters(optimizer)))


class _Block(Iteration):
    """The iteration as it is while a block is open: losses are scaled, and the rest has to wait.

    Args:
        around: The iteration, or another open block.
        optimizer: Whose gradients are judged.
    """

    def __init__(self, around: Iteration, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.around = around
        self.root: Iteration = around.root if isinstance(around, _Block) else around
        self.optimizer = optimizer
        while isinstance(around, _Block):
            if around.optimizer.param_groups is optimizer.param_groups:
                raise CallOrderError(
                    f"accumulate({name(optimizer)}): a block of this optimizer is already open"
                )
            around = around.around

    def step_of(self, optimizer: torch.optim.Optimizer) -> Step | None:
        """Raise: whatever asks for a step would take the gradients of the block for all."""
        raise CallOrderError(
            f"a block of accumulate({name(self.optimizer)}) is open: its gradients are only a part "
            f"of those of this iteration. Leave the block before unscale_(), clip_grad_norm_() or "
            f"step() of {name(optimizer)}"
        )

    def watch(self) -> None:
        """Notice what is added to gradients outside of the block."""
        self.root.watch()

    def join(self) -> None:
        """Tell the block or iteration around it which losses were scaled."""
        self.around.count_losses_of(self)
        if isinstance(self.around, _Block):
            # A parameter that both optimizers have is unscaled once.
            for check in self.checks:
                self.around.add(check)


def _require_untouched(iteration: Iteration, optimizer: torch.optim.Optimizer) -> None:
    call = f"accumulate({name(optimizer)})"
    earlier = iteration.step_of(optimizer)
    if earlier is not None and earlier.stage is not Stage.SCALED:
        raise CallOrderError(
            f"{call}: {earlier.stage.value} since the last update(). Put every backward() of the "
            "iteration into such a block, before unscale_() and step()"
        )
    if any(param.grad is not None for param in parameters(optimizer)):
        raise CallOrderError(
            f"{call}: there are gradients from before the first block of this iteration, of which "
            "nobody knows whether they are scaled. Call zero_grad(set_to_none=True) first"
        )


def _take_bad_losses(engine: Engine) -> list[tuple[LossScale, Tensor]]:
    """Forget which losses were bad before the block, so that those in it show; return them."""
    return [
        (scale, scale.take_bad_loss()) for scale in engine.scales.values() if scale.live is not None
    ]


@torch.no_grad()
def _judge(engine: Engine, block: _Block, blocks: Blocks) -> bool:
    """Unscale the gradients of the block; say whether to use them. Sync: one."""
    call = f"accumulate({name(block.optimizer)})"
    if engine.iteration is not block:
        raise CallOrderError(f"{call}: update() was called in the block. Call it after step()")
    if not block.losses:
        raise CallOrderError(
            f"{call}: no loss was scaled in the block. Call scaler.scale(loss).backward() in it"
        )
    step = gather(engine, "accumulate", block.optimizer, None)
    scale = step.loss_scale
    refuse_half(engine, step)
    unscale_(step)
    if not (step.checks or step.own_check):
        raise CallOrderError(
            f"{call}: the block left no gradient. Call scaler.scale(loss).backward() in it, for a "
            "loss that depends on these parameters"
        )
    if step.own_check is not None:
        block.add(step.own_check)
    is_bad, loss_is_bad = step.read([step.decide(), scale.take_bad_loss()])
    device = scale.tensor.device
    if loss_is_bad and block.around is not block.root:
        scale.mark_loss_bad()  # the block around sees it
    overflowed = bool(is_bad and not loss_is_bad)
    blocks.count += 1
    blocks.bad += bool(is_bad)
    blocks.overflowed += overflowed
    blocks.has_several_losses |= blocks.scale not in (None, scale)
    if overflowed or not blocks.overflowed:
        blocks.scale = scale
    # The scale is to move by an overflow, though the step may be taken without this block; and not
    # by a loss that no scale can help.
    found = {device: torch.full((), float(overflowed), dtype=torch.float32, device=device)}
    amax = None if is_bad or step.own_check is None else step.own_check.amax
    block.root.add(GradientCheck(scale, NONE, found, amax))
    return not is_bad


def _give_back(earlier: Stash) -> None:
    for param, grad in earlier:
        param.grad = grad


@torch.no_grad()
def _add(earlier: Stash) -> None:
    pairs = [(param, grad, param.grad) for param, grad in earlier if grad is not None]
    dense = [(grad, new) for _, grad, new in pairs if new is not None and not grad.is_sparse]
    alike = [(local_part(grad), local_part(new)) for grad, new in dense if _lie_alike(grad, new)]
    if alike:
        torch._foreach_add_(*map(list, zip(*alike, strict=True)))
    for total, part in dense:
        if not _lie_alike(total, part):
            total.add_(part)
    for param, grad, new in pairs:
        # A sparse tensor can be added to a dense one, not the other way round.
        param.grad = new + grad if new is not None and grad.is_sparse else grad


def _lie_alike(grad: Any, new: Any) -> bool:
    """Say whether this rank holds the same part of both."""
    return not is_dtensor(grad) or grad.placements == new.placements
