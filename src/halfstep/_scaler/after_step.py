"""What follows a step: calls that are left out after a skipped one, and the same batch again."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from halfstep._common.random_states import RandomStates
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.modules import buffers_of
from halfstep._scaler.checks import checked_count
from halfstep._scaler.engine import Engine
from halfstep._scaler.gradients import parameters
from halfstep._scaler.iteration import Journal
from halfstep._scaler.optimizers import name
from halfstep._scaler.scale_state import Reason
from halfstep._scaler.snapshot import Snapshot
from halfstep.errors import CallOrderError

Count = Literal["updates", "attempts"]


def check_count(count: str) -> None:
    """Raise ``ValueError`` if ``count`` is none of the choices."""
    if count not in ("updates", "attempts"):
        raise ValueError(
            f"count is {count!r}: pass 'updates' (steps that were taken) or 'attempts' (all steps)"
        )


def call_after_step(
    journal: Journal, optimizer: Any, function: Callable[[], object], count: Count
) -> bool:
    """Call ``function`` if the last step of ``optimizer`` counts; return whether it was called."""
    check_count(count)
    outcome = journal.of(optimizer)
    if count == "updates" and outcome.skipped:
        return False
    function()
    return True


def step_scheduler(journal: Journal, scheduler: Any, count: Count, args: tuple[Any, ...]) -> bool:
    """Call ``scheduler.step(*args)`` if the last step of its optimizer counts."""

    def step() -> None:
        with warnings.catch_warnings():
            # PyTorch's schedulers count calls of optimizer.step and take a first step that a scaler
            # skipped for one that was forgotten.
            for message in ("Detected call of `lr_scheduler", "Seems like `optimizer"):
                warnings.filterwarnings("ignore", message, UserWarning)
            scheduler.step(*args)

    return call_after_step(journal, scheduler.optimizer, step, count)


def retry(engine: Engine, optimizer: torch.optim.Optimizer, times: int) -> Iterator[int]:
    """Return the numbers of the attempts: 0, and more as long as a smaller scale may help.

    See :meth:`halfstep.GradScaler.retry`.
    """
    return _attempts(engine, optimizer, checked_count("times", times, at_least=0))


@keep_out_of_graphs
def _attempts(engine: Engine, optimizer: torch.optim.Optimizer, times: int) -> Iterator[int]:
    modules = engine.names.modules()
    params = [*parameters(optimizer), *(p for module in modules for p in module.parameters())]
    randomness = RandomStates({p.device for p in params})
    # As dictionaries: a module may put another tensor, or None, in the place of a buffer.
    held = [buffers_of(part) for module in modules for part in module.modules()]
    tensors = [buffer for each in held for buffer in each.values() if buffer is not None]
    buffers = Snapshot(tensors, [(each, dict(each)) for each in held])
    for attempt in itertools.count():
        seen = engine.journal.last(optimizer)
        yield attempt
        outcome = engine.journal.last(optimizer)
        if outcome is None or outcome is seen or not outcome.has_ended:
            raise CallOrderError(
                f"retry({name(optimizer)}): the loop must call scaler.step(optimizer) and "
                "scaler.update() for this optimizer, so that it is known whether the step was taken"
            )
        if attempt == times or outcome.reason is not Reason.OVERFLOW:
            return
        if outcome.scale_after == outcome.scale:
            return  # a static scale, or one that forgives: the same would happen again
        randomness.restore()
        buffers.restore()
        optimizer.zero_grad()
