"""Functions by which other rooms control a scaler.

A replay gives a scaler a temporary state. A runner, which unscales gradients right after each
backward pass, adds its own checks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep._gradients.buffers import Buffers
from halfstep._gradients.gradients import Gradients, parameters
from halfstep._scaler.iteration import Stage
from halfstep._scaler.ledger import Check, Entry
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.scaler import GradScaler


def begin_anew(scaler: GradScaler, scale: float | None) -> None:
    """Give a scaler a new state for a replay; restore ``vars(scaler)`` afterwards.

    It decides alone from then on, since other ranks do not replay its step. ``scale``: the scale of
    the losses; None keeps theirs.
    """
    scaler._engine = scaler._engine.copy_alone(scale)


def watch_names(scaler: GradScaler, model: torch.nn.Module) -> None:
    """Call ``GradScaler.watch``, even if a subclass uses that name differently."""
    scaler._engine.names.watch(model)


def restore_with(scaler: GradScaler, buffers: Buffers) -> None:
    """Let a skipped step restore these buffers, which other scalers may restore too."""
    scaler._engine.buffers = buffers


def loss_scale(scaler: GradScaler) -> LossScale:
    """Return the scale of the losses."""
    return scaler._engine.loss_scale


def has_stepped(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer was stepped or unscaled since the last ``update``."""
    return scaler._engine.iteration.step_of(optimizer) is not None


def is_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of an optimizer were unscaled or used by a step."""
    step = scaler._engine.iteration.step_of(optimizer)
    return step is not None and step.stage is not Stage.SCALED


def add_check(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    gradients: Gradients,
    found_inf: dict[torch.device, Tensor],
) -> Entry:
    """Add a check of all gradients of an optimizer that were unscaled elsewhere.

    ``found_inf``: device to float32 scalar, 1 if a gradient on the device is inf or NaN.
    """
    engine = scaler._engine
    check = Check(engine.loss_scale, found_inf)
    ranks = engine.ranks_of("step", optimizer, parameters(optimizer))
    check.agreement = ranks.agree_on(check)
    return engine.iteration.ledger.mark(gradients, check)


def end_iteration(scaler: GradScaler) -> None:
    """Call ``update`` if gradients were checked since the last one."""
    if scaler._engine.iteration.checks:
        scaler.update()
