"""transformers: halfstep's GradScaler in a Trainer, and halfstep's scalars in the Trainer's log."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from halfstep import GradScaler
from halfstep.integrations import accelerate, needs
from halfstep.sinks import prefixed

with needs("transformers"):
    from transformers import Trainer


def use_scaler(trainer: Trainer, scaler: GradScaler | None = None) -> GradScaler:
    """Make a Trainer with ``fp16=True`` scale with halfstep's GradScaler, before ``train``.

    The other argument, the errors and the effect are those of
    :func:`halfstep.integrations.accelerate.use_scaler` for the Trainer's Accelerator. The Trainer
    saves and loads the scaler with its checkpoints.

    Example:
        >>> import tempfile, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> arguments = TrainingArguments(tempfile.mkdtemp(), fp16=True, use_cpu=True)
        >>> trainer = Trainer(torch.nn.Linear(2, 1), arguments)
        >>> use_scaler(trainer).get_scale()
        65536.0
    """
    return accelerate.use_scaler(trainer.accelerator, scaler)


class TrainerSink:
    """A sink of :class:`halfstep.record` that adds its scalars to the Trainer's log of the loss.

    Every ``logging_steps`` the log gets the last known scalars of :mod:`halfstep.sinks`, without
    loss and norm, which the Trainer logs itself. ``halfstep/skipped`` counts the steps skipped
    since the last log.

    Args:
        trainer: The Trainer; its ``log`` is replaced on the object.

    Example:
        >>> import tempfile, halfstep, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> arguments = TrainingArguments(tempfile.mkdtemp(), fp16=True, use_cpu=True)
        >>> trainer = Trainer(torch.nn.Linear(2, 1), arguments)
        >>> with halfstep.record(tempfile.mkdtemp(), sinks=[TrainerSink(trainer)]):
        ...     pass  # trainer.train()
    """

    def __init__(self, trainer: Trainer) -> None:
        self._scalars: dict[str, float] = {}
        log = trainer.log

        @wraps(log)
        def log_with_scalars(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:  # a log of training, not of an evaluation
                # Scalars that a later sink has added are newer.
                logs = prefixed(self._scalars) | logs
                self._scalars["skipped"] = 0.0
            log(logs, *args, **kwargs)

        trainer.log = log_with_scalars

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Store the scalars for the Trainer's next log."""
        skipped = self._scalars.get("skipped", 0.0) + scalars.get("skipped", 0.0)
        self._scalars |= {**scalars, "skipped": skipped}
        for name in ("loss", "norm"):
            self._scalars.pop(name, None)
