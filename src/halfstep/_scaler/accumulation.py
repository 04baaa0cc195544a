"""Accumulation of the gradients of several losses, with a check of each before it is added."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep._gradients.gradients import NONE, parameters
from halfstep._gradients.optimizers import makes_step_of, name
from halfstep._pytorch.amp import add_to_each_
from halfstep._pytorch.distributed import is_dtensor, local_part
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Blocks, Iteration, Remembered, Stage, flag_on
from halfstep._scaler.ledger import GradientCheck
from halfstep._scaler.step import gather, refuse_half, unscale_
from halfstep.errors import CallOrderError

Stash: TypeAlias = list[tuple[Tensor, Tensor | None]]
"""Parameters and their previous gradients."""


@contextmanager
def accumulate(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Add the unscaled gradients of this block to the earlier ones, unless they are not finite.

    While all blocks so far are bad, the gradients of the last one are kept, to show the cause. See
    :meth:`halfstep.GradScaler.accumulate`.
    """
    block = _Block(engine.iteration, optimizer)
    blocks = block.root.blocks.get(id(optimizer))
    if blocks is None:
        _require_untouched(block.root, optimizer)
        blocks = Blocks(optimizer, engine.loss_scale)
    has_good = blocks.bad < blocks.count
    earlier = [(param, param.grad) for param in parameters(optimizer)]
    for param, _ in earlier:
        param.grad = None
    bad_loss = _take_bad_loss(engine)
    block.root.ledger.watch()
    buffers = engine.buffers.copies()
    engine.iteration = block
    try:
        yield
        is_good = _judge(engine, block, blocks)
        if not is_good:
            for copy in buffers:
                copy.restore()
        if has_good and is_good:
            _add(earlier)
        elif has_good:
            _give_back(earlier)
    except BaseException:
        _give_back(earlier)
        _take_bad_loss(engine)
        raise
    finally:
        if engine.iteration is block:
            engine.iteration = block.around
            if bad_loss is not None:
                engine.loss_scale.see_loss(1.0 / (1.0 - bad_loss))
    block.join()
    block.root.blocks[id(optimizer)] = blocks
    for each in block.root.blocks_with(parameters(optimizer)):
        each.note_end(block.root)


class _Block(Iteration):
    """The iteration while a block is open: losses can be scaled, but steps must wait.

    ``around`` is the surrounding iteration or block; ``optimizer`` owns the checked gradients.
    """

    def __init__(self, around: Iteration, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(around.ledger.inner())
        self.around = around
        self.root: Iteration = around.root if isinstance(around, _Block) else around
        self.optimizer = optimizer
        while isinstance(around, _Block):
            open_one = around.optimizer
            if makes_step_of(open_one, optimizer) and makes_step_of(optimizer, open_one):
                raise CallOrderError(
                    f"accumulate({name(optimizer)}): a block of this optimizer is already open"
                )
            around = around.around

    def step_of(self, optimizer: torch.optim.Optimizer) -> Remembered | None:
        """Raise: a step would mistake the gradients of the block for those of the iteration."""
        raise CallOrderError(
            f"a block of accumulate({name(self.optimizer)}) is open: its gradients are only a part "
            f"of those of this iteration. Leave the block before unscale_(), clip_grad_norm_() or "
            f"step() of {name(optimizer)}"
        )

    def join(self) -> None:
        """Add the losses to those of the surrounding block or iteration."""
        self.around.num_losses += self.num_losses
        if isinstance(self.around, _Block):
            # A parameter of both optimizers is unscaled only once.
            self.around.ledger.take_over(self.ledger.entries)
            self.around.ledger.watch()


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
            f"{call}: there are gradients from before the first block of this iteration, and it "
            "is unknown whether they are scaled. Call zero_grad(set_to_none=True) first"
        )


def _take_bad_loss(engine: Engine) -> Tensor | None:
    """Return and clear the flag of bad losses, so that those of the block can be told apart."""
    scale = engine.loss_scale
    return scale.take_loss_flag() if scale.is_created else None


@torch.no_grad()
def _judge(engine: Engine, block: _Block, blocks: Blocks) -> bool:
    """Unscale the gradients of the block; return whether to use them. Sync: one."""
    call = f"accumulate({name(block.optimizer)})"
    if engine.iteration is not block:
        raise CallOrderError(f"{call}: update() was called in the block. Call it after step()")
    if not block.num_losses:
        raise CallOrderError(
            f"{call}: no loss was scaled in the block. Call scaler.scale(loss).backward() in it"
        )
    params = parameters(block.optimizer)
    gathered = gather(engine, "accumulate", block.optimizer, params, block.optimizer)
    if any(map(block.ledger.is_fresh, params)):
        raise CallOrderError(
            f"{call}: backward() has added scaled gradients to those that a block inside this one "
            "has unscaled. Put every backward() that reaches parameters of both optimizers into "
            "the inner block"
        )
    scale = gathered.loss_scale
    refuse_half(engine, gathered)
    checked = unscale_(gathered)
    if not checked.checks():
        raise CallOrderError(
            f"{call}: the block left no gradient. Call scaler.scale(loss).backward() in it, for a "
            "loss that depends on these parameters"
        )
    if checked.own is not None:
        block.ledger.mark(checked.newly_checked, checked.own)
    is_bad, loss_is_bad = checked.read([checked.decide().skip, scale.take_loss_flag()])
    if loss_is_bad and block.around is not block.root:
        scale.mark_loss_bad()  # for the surrounding block
    overflowed = bool(is_bad and not loss_is_bad)
    blocks.count += 1
    blocks.bad += bool(is_bad)
    blocks.overflowed += overflowed
    # An overflow must reduce the scale even if the step is taken without this block. A non-finite
    # loss must not, while other blocks are finite at this scale.
    check = GradientCheck(scale, flag_on(scale, overflowed))
    check.note(overflowed)
    block.root.ledger.mark(NONE, check)
    return not is_bad


def _give_back(earlier: Stash) -> None:
    for param, grad in earlier:
        param.grad = grad


@torch.no_grad()
def _add(earlier: list[tuple[Any, Any]]) -> None:
    alike: list[tuple[Tensor, Tensor]] = []
    for param, grad in earlier:
        new = param.grad
        if grad is None:
            continue
        if new is not None and grad.is_sparse:
            # A sparse tensor can be added to a dense one, but not vice versa.
            param.grad = new + grad
            continue
        param.grad = grad
        if new is not None and (not is_dtensor(grad) or grad.placements == new.placements):
            alike.append((local_part(grad), local_part(new)))
        elif new is not None:
            grad.add_(new)
    if alike:
        add_to_each_(*map(list, zip(*alike, strict=True)))
