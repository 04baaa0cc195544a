"""ultralytics: a callback that puts halfstep's scaler in place of the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep import GradScaler

if TYPE_CHECKING:
    from ultralytics.engine.trainer import BaseTrainer


def use_scaler(trainer: BaseTrainer, scaler: GradScaler | None = None) -> None:
    """Put a scaler in place of that of a trainer, in its callback ``on_train_start``.

    Where the trainer's is off, as on a CPU, with ``amp=False`` or ``amp="bf16"``, nothing is
    changed. In a run that is resumed the scaler takes over the state that was saved.

    Args:
        trainer: The trainer, which passes itself to its callbacks.
        scaler: The scaler; left out, a ``GradScaler()``. ``functools.partial(use_scaler,
            scaler=...)`` makes a callback with one.

    Sync: none.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(  # model.add_callback("on_train_start", use_scaler)
        ...     model=torch.nn.Linear(4, 1), scaler=torch.amp.GradScaler("cpu"), resume=False
        ... )
        >>> use_scaler(trainer)
        >>> isinstance(trainer.scaler, GradScaler)
        True
    """
    theirs = trainer.scaler
    if not theirs.is_enabled():
        return
    ours = GradScaler() if scaler is None else scaler
    if trainer.resume:
        ours.load_state_dict(theirs.state_dict())
    ours.watch(trainer.model)
    trainer.scaler = ours
