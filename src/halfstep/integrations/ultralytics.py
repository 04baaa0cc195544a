"""ultralytics: a callback that replaces the trainer's scaler with halfstep's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep import GradScaler

if TYPE_CHECKING:
    from ultralytics.engine.trainer import BaseTrainer


def use_scaler(trainer: BaseTrainer, scaler: GradScaler | None = None) -> None:
    """Replace the scaler of a trainer; a callback for ``on_train_start``.

    Nothing changes if the trainer's scaler is off, as on a CPU, with ``amp=False`` or
    ``amp="bf16"``. In a resumed run, the new scaler loads the saved state.

    Args:
        trainer: The trainer, which passes itself to its callbacks.
        scaler: The scaler; by default a new ``GradScaler()``. ``functools.partial(use_scaler,
            scaler=...)`` is a callback with a given scaler.

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
