"""Mixed precision for an unmodified training script that has none (``halfstep run --amp``).

``amp_forward`` runs the model under autocast, ``amp_backward`` scales losses and unscales
gradients, ``amp_steps`` lets optimizers step through the scaler, ``amp_script`` prints messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer

from halfstep._autocast import Policy
from halfstep._autocast.region import listening
from halfstep._common.patches import Patches, watch_steps
from halfstep._run.amp_backward import Backward, FreshGradients
from halfstep._run.amp_forward import Forward
from halfstep._run.amp_script import ScriptState
from halfstep._run.amp_steps import ScaledSteps, Schedules
from halfstep._scaler import GradScaler, access
from halfstep._scaler.guard import GuardScaler


@contextmanager
def mixed_precision(
    dtype: torch.dtype, say: Callable[[str], None], *, policy: Policy | str | None = None
) -> Iterator[GradScaler | None]:
    """Run training loops inside the block in mixed precision; docs/run.md describes what that is.

    Everything is restored when the block ends. It costs 0.1 to 0.2 microseconds per call of a
    module; with float16 about 1 per node of the autograd graph, and in each backward pass one read
    and write of the gradients, two if the pass adds to existing ones. Limits: a module that is
    called inside a compiled function but not compiled itself runs unchanged, as does one that is
    being exported. Optimizers and schedules made before the block are found, except an optimizer
    that already had a schedule.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        say: Receives each message, one line: what was found, after the first iteration; or why
            nothing is done.
        policy: As for :class:`halfstep.autocast`; its rules for modules apply to the first model.

    Yields:
        The scaler; None for bfloat16, which needs none.
    """
    script = ScriptState(dtype, say)
    scaler = GradScaler() if script.is_scaling else None
    patches = Patches()
    try:
        forward = Forward(dtype, policy, script)
        forward.install(patches)
        _watch_scalers(patches, scaler, script)
        if scaler is None:
            _note_steps(patches, script)
        else:
            _scale(patches, scaler, script)
        try:
            with listening(forward.note_region):
                yield scaler
        except SystemExit:  # many scripts end this way
            _end(scaler, script)
            raise
        _end(scaler, script)
    finally:
        patches.undo()
        script.is_on = False


def _end(scaler: GradScaler | None, script: ScriptState) -> None:
    if scaler is not None:
        access.end_iteration(scaler)
    script.end()


def _scale(patches: Patches, scaler: GradScaler, script: ScriptState) -> None:
    fresh, schedules = FreshGradients(), Schedules(script)
    backward = Backward(scaler, fresh, script)
    for part in (backward, ScaledSteps(scaler, backward, fresh, schedules, script), schedules):
        part.install(patches)


def _note_steps(patches: Patches, script: ScriptState) -> None:
    def step(original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        script.note_step(optimizer)
        return original(optimizer, *args, **kwargs)

    watch_steps(patches, step, meet=lambda _: None)


def _watch_scalers(patches: Patches, ours: GradScaler | None, script: ScriptState) -> None:
    """Switch off when the script has a scaler of its own."""

    def look(scaler: Any) -> None:
        if not script.is_training or scaler is ours or not scaler.is_enabled():
            return
        if not isinstance(scaler, GuardScaler):
            script.switch_off("the script has a GradScaler of its own")
        elif script.is_scaling:  # both would decide which steps are taken
            script.switch_off("the script has a guard, which looks at unscaled gradients")

    def init(original: Callable[..., None], scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        look(scaler)

    def scale(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # it may have been made before the block
            look(scaler)
        return original(scaler, *args, **kwargs)

    for cls in (GradScaler, TorchGradScaler):
        patches.wrap(cls, "__init__", init)
        patches.wrap(cls, "scale", scale)
