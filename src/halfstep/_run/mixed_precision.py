"""Mixed precision for a training script that has none, without an edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer

from halfstep._autocast import Policy
from halfstep._common.patches import Patches, watch_steps
from halfstep._run.amp.backward import Backward
from halfstep._run.amp.findings import Findings
from halfstep._run.amp.forward import Forward
from halfstep._run.amp.fresh import Fresh
from halfstep._run.amp.schedules import Schedules
from halfstep._run.amp.steps import Steps
from halfstep._scaler import GradScaler


@contextmanager
def mixed_precision(
    dtype: torch.dtype, say: Callable[[str], None], *, policy: Policy | str | None = None
) -> Iterator[GradScaler | None]:
    """Let a training loop inside the block run in mixed precision.

    **The model.** A module with parameters that is called outside of any other runs under
    ``halfstep.autocast``, in training and in evaluation. What it returns in lower precision comes
    back in float32: code that knows nothing of autocast then goes on as before (``.numpy()`` of a
    bfloat16 tensor raises), and the loss is computed in float32, as autocast would. PyTorch's loss
    functions run under autocast where they are given lower precision all the same. A model that is
    called by another method than itself (``model.forward(x)``) is one by its modules.

    **The gradients** (float16 only). ``backward`` multiplies the loss by the scale of one
    :class:`halfstep.GradScaler` and divides every gradient that it has added to by the scale before
    it returns. So clipping, accumulation, and code that reads or changes ``.grad`` between backward
    and step see what they would see without a scale. This reads and writes the gradients once in
    each backward pass, and twice if it adds to others. Only hooks that run inside a backward pass
    see scaled gradients. ``torch.autograd.grad``, and ``backward(create_graph=True)``, are not
    scaled: their gradients are right, but small ones may underflow.

    **The step.** ``optimizer.step()`` is skipped if a gradient is inf or NaN. The scale moves when
    all optimizers that a backward pass has reached have stepped, at the latest when the next one
    begins. A step of gradients that no scaled backward pass has made is left alone. A schedule
    moves if a step of its optimizer was taken since it last did.

    **The script's own.** If it makes a GradScaler that is enabled, trains parameters in float16, or
    shards its model by FSDP (float16 only), it is left alone from there on. Inside an autocast of
    its own, that one decides. Autocast and GradScaler with ``enabled=False`` do not count.

    Everything is put back when the block ends. What it costs: a tenth of a microsecond or two for
    each call of a module, about one for each node of the autograd graph. Limits: a module that is
    called inside a compiled function, and not compiled itself, runs as it is; so does one that is
    being exported. Optimizers and schedules made before the block are found, but not an optimizer
    that had a schedule then.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        say: Takes each message, a line: what was found, once the loop has come round; why nothing
            is done.
        policy: As for :class:`halfstep.autocast`; its rules for modules mean the first model.

    Yields:
        The scaler; None for bfloat16, which needs none.

    Raises:
        ValueError: ``dtype`` is neither.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"mixed_precision({dtype}): pass torch.float16 or torch.bfloat16")
    findings = Findings(dtype, say)
    scaler = GradScaler() if findings.is_scaling else None
    patches = Patches()
    steps = None
    try:
        Forward(dtype, policy, findings).install(patches)
        _watch_scalers(patches, scaler, findings)
        if scaler is None:
            watch_steps(patches, _note_step(findings), meet=lambda _: None)
        else:
            steps = _install_scaling(patches, scaler, findings)
        try:
            yield scaler
        except SystemExit:  # is how many scripts end
            _end(steps, findings)
            raise
        _end(steps, findings)
    finally:
        patches.undo()
        findings.is_on = False


def _install_scaling(patches: Patches, scaler: GradScaler, findings: Findings) -> Steps:
    fresh, schedules = Fresh(), Schedules(findings)
    backward = Backward(scaler, fresh, findings)
    steps = Steps(scaler, backward, fresh, schedules, findings)
    for part in (backward, steps, schedules):
        part.install(patches)
    return steps


def _end(steps: Steps | None, findings: Findings) -> None:
    if steps is not None:
        steps.end()
    findings.end()


def _note_step(findings: Findings) -> Callable[..., Any]:
    def step(original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        findings.note_step(optimizer)
        return original(optimizer, *args, **kwargs)

    return step


def _watch_scalers(patches: Patches, ours: GradScaler | None, findings: Findings) -> None:
    """Leave the script alone when it has a scaler of its own."""

    def look(scaler: Any) -> None:
        if findings.is_training and scaler is not ours and scaler.is_enabled():
            findings.switch_off("the script scales by itself, with a GradScaler of its own")

    def init(original: Callable[..., None], scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        look(scaler)

    def scale(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # one that was made before
            look(scaler)
        return original(scaler, *args, **kwargs)

    for made, used in ((GradScaler, GradScaler), (TorchGradScaler, TorchGradScaler)):
        patches.wrap(made, "__init__", init)
        patches.wrap(used, "scale", scale)
