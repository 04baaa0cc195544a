"""What is to happen after a step that was taken, and not after one that was skipped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

from halfstep._scaler.iteration import Journal

Count = Literal["updates", "attempts"]


def check_count(count: str) -> None:
    """Raise ``ValueError`` if ``count`` is none of the choices."""
    if count not in ("updates", "attempts"):
        raise ValueError(
            f"count is {count!r}: pass 'updates' (steps that were taken) or 'attempts' (all steps)"
        )


def after_step(
    journal: Journal, optimizer: Any, function: Callable[[], object], count: Count
) -> bool:
    """Call ``function`` if the last step of ``optimizer`` counts; say whether it was called."""
    check_count(count)
    outcome = journal.of(optimizer)
    if count == "updates" and outcome.skipped:
        return False
    function()
    return True


def step_scheduler(journal: Journal, scheduler: Any, count: Count, args: tuple[Any, ...]) -> bool:
    """Call ``scheduler.step(*args)`` if the last step of its optimizer counts."""
    return after_step(journal, scheduler.optimizer, lambda: _quiet_step(scheduler, args), count)


def _quiet_step(scheduler: Any, args: tuple[Any, ...]) -> None:
    with warnings.catch_warnings():
        # PyTorch's schedulers count calls of optimizer.step and take a first step that a scaler
        # skipped for one that was forgotten.
        for message in ("Detected call of `lr_scheduler", "Seems like `optimizer"):
            warnings.filterwarnings("ignore", message, UserWarning)
        scheduler.step(*args)
