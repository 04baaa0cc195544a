"""Destinations for the scalars of a recorded run: TensorBoard, W&B, or your own.

A sink is any object with ``log(step, scalars)``. The scalars of a step are ``loss``, ``scale``,
``norm`` and ``skipped`` (1.0 or 0.0), if known; a sampled step also has ``share_lost_updates``
(over all weights), ``headroom`` (bits, the minimum over all tensors), ``underflow`` (known fraction
of entries, the maximum over all parameter gradients) and ``non_finite`` (number of tensors with NaN
or inf).

>>> class Printer:
...     def log(self, step, scalars):
...         print(step, scalars)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """A receiver of scalars, called in the training process some steps later, so it must be fast.

    A sink that raises is removed, with a warning.
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Receive the scalars of a step, by name."""


class TensorBoard:
    """A sink that writes to TensorBoard under ``halfstep/``.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or the folder for a new one.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
    """

    def __init__(self, writer: Any) -> None:
        if not hasattr(writer, "add_scalar"):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError:
                raise ModuleNotFoundError(
                    "halfstep.sinks.TensorBoard needs the package tensorboard, which is not "
                    "installed; install it with: pip install tensorboard"
                ) from None
            writer = SummaryWriter(writer)
        self._writer = writer

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars."""
        for name, value in prefixed(scalars).items():
            self._writer.add_scalar(name, value, step)


class WandB:
    """A sink that adds to the current W&B run of a script.

    It never commits, so the script's W&B steps do not change: if several scalars arrive between two
    calls of ``run.log`` in the script, W&B keeps the newest. ``halfstep/step`` gives their step.

    Args:
        run: The run. Default: ``wandb.run``.

    Raises:
        ValueError: There is no current run.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            # A script with a run has imported wandb; this package starts none.
            run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            raise ValueError(
                "halfstep.sinks.WandB: no W&B run is running, and this starts none; make it after "
                "wandb.init(), or give it the run"
            )
        self._run = run

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Pass the scalars to W&B."""
        self._run.log(prefixed({**scalars, "step": step}), commit=False)


def prefixed(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return scalars with the prefix ``halfstep/``, for a sink of your own."""
    return {f"halfstep/{name}": value for name, value in scalars.items()}
