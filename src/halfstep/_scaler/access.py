"""Functions by which other rooms control a scaler.

A replay gives a scaler a temporary state. A runner, which unscales gradients right after each
backward pass, adds its own checks.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch.amp.grad_scaler import OptState

from halfstep._gradients.buffers import Buffers
from halfstep._gradients.gradients import Flags, Gradients, parameters
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Check, Entry
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.ranks import Ranks
from halfstep._scaler.scaler import GradScaler


def begin_anew(scaler: GradScaler, scale: float | None) -> None:
    """Give a scaler a new state for a replay; restore ``vars(scaler)`` afterwards.

    It decides alone from then on, since other ranks do not replay its step. None keeps the scale.
    """
    before = scaler._engine.loss_scale
    state = before.read() if scale is None else replace(before.read(), scale=scale)
    scaler._engine = Engine(state, Ranks("local"), scaler)
    if before.is_created:
        scaler._engine.create_scale(before.device)
    scaler._alarm = copy(scaler._alarm)


def watch_names(scaler: GradScaler, model: torch.nn.Module) -> None:
    """Call ``GradScaler.watch``, even if a subclass uses that name differently."""
    scaler._engine.names.watch(model)


def restore_with(scaler: GradScaler, buffers: Buffers) -> None:
    """Let a skipped step restore these buffers, which other scalers may restore too."""
    scaler._engine.buffers = buffers


def loss_scale(scaler: GradScaler) -> LossScale:
    """Return the scale of the losses."""
    return scaler._engine.loss_scale


def is_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of an optimizer were unscaled or used by a step."""
    step = scaler._engine.iteration.steps.get(id(optimizer))
    return step is not None and step.stage is not OptState.READY


def add_check(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, gradients: Gradients, found_inf: Flags
) -> Entry:
    """Add a check of all gradients of an optimizer that were unscaled elsewhere."""
    engine = scaler._engine
    ranks = engine.ranks_of("step", optimizer, parameters(optimizer))
    check = Check(found_inf, agreement=ranks.agree_on(engine.loss_scale, found_inf))
    return engine.iteration.ledger.mark(gradients, check)


def end_iteration(scaler: GradScaler) -> None:
    """Call ``update`` if gradients were checked since the last one."""
    if scaler._engine.iteration.checks:
        scaler.update()


def drop_iteration(scaler: GradScaler) -> None:
    """End an iteration whose step has raised an error: the scale stays."""
    scaler._engine.end_iteration()
