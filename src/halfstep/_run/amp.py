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
from halfstep._common.patches import Patches, watch_steps
from halfstep._run.amp_backward import Backward, FreshGradients
from halfstep._run.amp_forward import Forward
from halfstep._run.amp_script import ScriptState
from halfstep._run.amp_steps import ScaledSteps, Schedules
from halfstep._scaler import GradScaler


@contextmanager
def mixed_precision(
    dtype: torch.dtype, say: Callable[[str], None], *, policy: Policy | str | None = None
) -> Iterator[GradScaler | None]:
    """Run training loops inside the block in mixed precision.

    **The model.** A top-level call of a module with parameters runs under ``halfstep.autocast``, in
    training and in evaluation. Its outputs in lower precision are returned in float32: code that
    knows nothing of autocast works as before (``.numpy()`` of a bfloat16 tensor raises), and the
    loss is computed in float32, as under autocast. PyTorch's loss functions run under autocast if
    they still receive lower precision. For a model that is called by another method
    (``model.forward(x)``), each of its modules counts as a model.

    **The gradients** (float16 only). ``backward`` multiplies the loss by the scale of one
    :class:`halfstep.GradScaler` and divides the resulting gradients by the scale before it returns.
    Clipping, accumulation, and code that reads or changes ``.grad`` between backward and step
    therefore work as without a scale. This reads and writes the gradients once in each backward
    pass, and twice if the pass adds to existing ones. Only hooks inside a backward pass see scaled
    gradients. ``torch.autograd.grad`` and ``backward(create_graph=True)`` are not scaled: their
    gradients are right, but small ones may underflow.

    **The step.** ``optimizer.step()`` is skipped if a gradient is inf or NaN. The scale moves when
    all optimizers with gradients from a backward pass have stepped, at the latest when the next
    pass begins. A step with gradients from no scaled backward pass is left alone. A schedule moves
    if a step of its optimizer was taken since its last move.

    **Scripts with their own AMP.** A script that makes an enabled GradScaler, trains parameters in
    float16, or shards its model by FSDP (float16 only) is left alone from there on. Inside the
    script's own autocast, that autocast applies. ``enabled=False`` does not count.

    Everything is restored when the block ends. It costs 0.1 to 0.2 microseconds per call of a
    module, and about 1 per node of the autograd graph. Limits: a module that is called inside a
    compiled function but not compiled itself runs unchanged, as does one that is being exported.
    Optimizers and schedules made before the block are found, except an optimizer that already had
    a schedule.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        say: Receives each message, one line: what was found, after the first iteration; or why
            nothing is done.
        policy: As for :class:`halfstep.autocast`; its rules for modules apply to the first model.

    Yields:
        The scaler; None for bfloat16, which needs none.

    Raises:
        ValueError: ``dtype`` is neither.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"mixed_precision({dtype}): pass torch.float16 or torch.bfloat16")
    script = ScriptState(dtype, say)
    scaler = GradScaler() if script.is_scaling else None
    patches = Patches()
    steps = None
    try:
        Forward(dtype, policy, script).install(patches)
        _watch_scalers(patches, scaler, script)
        if scaler is None:
            watch_steps(patches, _note_step(script), meet=lambda _: None)
        else:
            steps = _install_scaling(patches, scaler, script)
        try:
            yield scaler
        except SystemExit:  # many scripts end this way
            _end(steps, script)
            raise
        _end(steps, script)
    finally:
        patches.undo()
        script.is_on = False


def _install_scaling(patches: Patches, scaler: GradScaler, script: ScriptState) -> ScaledSteps:
    fresh, schedules = FreshGradients(), Schedules(script)
    backward = Backward(scaler, fresh, script)
    steps = ScaledSteps(scaler, backward, fresh, schedules, script)
    for part in (backward, steps, schedules):
        part.install(patches)
    return steps


def _end(steps: ScaledSteps | None, script: ScriptState) -> None:
    if steps is not None:
        steps.end()
    script.end()


def _note_step(script: ScriptState) -> Callable[..., Any]:
    def step(original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        script.note_step(optimizer)
        return original(optimizer, *args, **kwargs)

    return step


def _watch_scalers(patches: Patches, ours: GradScaler | None, script: ScriptState) -> None:
    """Switch off when the script has a scaler of its own."""

    def look(scaler: Any) -> None:
        if script.is_training and scaler is not ours and scaler.is_enabled():
            script.switch_off("the script has a GradScaler of its own")

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
