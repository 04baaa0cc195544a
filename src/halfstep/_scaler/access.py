"""The events of scalers for other rooms, and the verbs that drive one beyond its public calls.

A recorder and a watch observe losses and iterations. A replay gives a scaler a state of its own. A
runner, which unscales gradients right after each backward pass, adds what it has found.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from halfstep._scaler.gradients import Gradients, parameters
from halfstep._scaler.iteration import GradientCheck, Stage

if TYPE_CHECKING:
    from halfstep._scaler.loss_scale import LossScale
    from halfstep._scaler.outcome import Outcome
    from halfstep._scaler.scaler import GradScaler

# --- events ---------------------------------------------------------------------------------------


class Observer(Protocol):
    """Is told of the losses and iterations of all scalers, and never waits for the device."""

    def on_loss(self, scaler: GradScaler, outputs: Any) -> None:
        """Note what the user hands to ``scale``, before it is scaled."""

    def on_iteration(self, scaler: GradScaler, outcomes: Sequence[Outcome]) -> None:
        """Note that ``update`` has ended an iteration with these steps."""


OBSERVERS: list[Observer] = []
"""The observers, in the order in which they came."""


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell an observer of what happens in a block."""
    OBSERVERS.append(observer)
    try:
        yield
    finally:
        with suppress(ValueError):  # a replay hides all of them
            OBSERVERS.remove(observer)


@contextmanager
def unobserved() -> Iterator[None]:
    """Tell no observer of what happens in a block."""
    observers = OBSERVERS[:]
    OBSERVERS.clear()
    try:
        yield
    finally:
        OBSERVERS[:] = observers


class _Thread(threading.local):
    stepping: GradScaler | None = None


THIS_THREAD = _Thread()
"""The state of the present thread: the scaler, of a guard too, that steps an optimizer in it."""


def is_in_step() -> bool:
    """Return whether a scaler makes the step of an optimizer that runs in this thread.

    A stage of a pipeline scales no loss: nothing else tells its steps from plain ones.
    """
    return THIS_THREAD.stepping is not None


# --- driving a scaler -----------------------------------------------------------------------------


def begin_anew(scaler: GradScaler, scale: float | None) -> None:
    """Give a scaler a new state for a replay; keep ``vars(scaler)`` to bring its own back.

    It decides alone from now on: other ranks do not replay its step. ``scale``: that of all losses;
    None for the scales that they have.
    """
    scaler._engine = scaler._engine.copy_alone(scale)


def watch_names(scaler: GradScaler, model: torch.nn.Module) -> None:
    """Call ``GradScaler.watch``, whatever a subclass means by that name."""
    scaler._engine.names.watch(model)


def unnamed_scale(scaler: GradScaler) -> LossScale:
    """Return the scale of losses without a name."""
    return scaler._engine.scales[None]


def has_stepped(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has stepped, or was unscaled, since the last ``update``."""
    return scaler._engine.iteration.step_of(optimizer) is not None


def is_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of an optimizer were divided by the scale, or used."""
    step = scaler._engine.iteration.step_of(optimizer)
    return step is not None and step.stage is not Stage.SCALED


def add_check(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    gradients: Gradients,
    found_inf: dict[torch.device, Tensor],
) -> GradientCheck:
    """Add a check of all gradients of an optimizer that were unscaled elsewhere, and return it.

    ``found_inf`` is for each device a float32 scalar, 1 if some gradient there is inf or NaN.
    """
    engine = scaler._engine
    check = GradientCheck(engine.scales[None], gradients, found_inf)
    engine.ranks_of("step", optimizer, parameters(optimizer)).agree_on(check)
    engine.iteration.add(check)
    return check


def end_iteration(scaler: GradScaler) -> None:
    """Call ``update`` if gradients were checked since the last one."""
    if scaler._engine.iteration.checks:
        scaler.update()
