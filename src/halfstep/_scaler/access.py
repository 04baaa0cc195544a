"""Observers of scalers for other modules, and functions that control a scaler internally.

Recorders and diagnoses observe losses and iterations. A replay gives a scaler a temporary state. A
runner, which unscales gradients right after each backward pass, adds its own checks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from halfstep._gradients.gradients import Gradients, parameters
from halfstep._scaler.iteration import GradientCheck, Stage

if TYPE_CHECKING:
    from halfstep._scaler.loss_scale import LossScale
    from halfstep._scaler.outcome import Outcome
    from halfstep._scaler.scaler import GradScaler

# --- events ---------------------------------------------------------------------------------------


class Observer(Protocol):
    """An observer of the losses and iterations of all scalers. It must not wait for the device."""

    def on_loss(self, scaler: GradScaler, outputs: Any) -> None:
        """Handle the argument of ``scale`` before it is scaled."""

    def on_iteration(self, scaler: GradScaler, outcomes: Sequence[Outcome]) -> None:
        """Handle the end of an iteration, with the outcomes of its steps."""


OBSERVERS: list[Observer] = []
"""The active observers, oldest first."""


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Notify an observer while the block runs."""
    OBSERVERS.append(observer)
    try:
        yield
    finally:
        with suppress(ValueError):  # a replay removes all observers
            OBSERVERS.remove(observer)


@contextmanager
def unobserved() -> Iterator[None]:
    """Suspend all observers while the block runs."""
    observers = OBSERVERS[:]
    OBSERVERS.clear()
    try:
        yield
    finally:
        OBSERVERS[:] = observers


class _Thread(threading.local):
    stepping: GradScaler | None = None


THIS_THREAD = _Thread()
"""State of the current thread: the scaler (or that of a guard) that is stepping an optimizer."""


def is_in_step() -> bool:
    """Return whether a scaler is making a step in this thread.

    A pipeline stage scales no loss, so nothing else distinguishes its steps from plain ones.
    """
    return THIS_THREAD.stepping is not None


# --- driving a scaler -----------------------------------------------------------------------------


def begin_anew(scaler: GradScaler, scale: float | None) -> None:
    """Give a scaler a new state for a replay; restore ``vars(scaler)`` afterwards.

    It decides alone from then on, since other ranks do not replay its step. ``scale``: the scale of
    the losses; None keeps theirs.
    """
    scaler._engine = scaler._engine.copy_alone(scale)


def watch_names(scaler: GradScaler, model: torch.nn.Module) -> None:
    """Call ``GradScaler.watch``, even if a subclass uses that name differently."""
    scaler._engine.names.watch(model)


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
) -> GradientCheck:
    """Add a check of all gradients of an optimizer that were unscaled elsewhere, and return it.

    ``found_inf``: device to float32 scalar, 1 if a gradient on the device is inf or NaN.
    """
    engine = scaler._engine
    check = GradientCheck(engine.loss_scale, gradients, found_inf)
    engine.ranks_of("step", optimizer, parameters(optimizer)).agree_on(check)
    engine.iteration.add(check)
    return check


def end_iteration(scaler: GradScaler) -> None:
    """Call ``update`` if gradients were checked since the last one."""
    if scaler._engine.iteration.checks:
        scaler.update()
