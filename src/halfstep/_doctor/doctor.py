"""``halfstep.doctor``: a check of a training before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep._doctor import flags, objects
from halfstep._doctor.finding import Checkup, Finding
from halfstep._doctor.objects import Training
from halfstep._scaler import GradScaler

_SCALERS = (GradScaler, torch.amp.GradScaler)


def doctor(
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    step_fn: Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Checkup:
    """Check a training for mistakes in mixed precision before it starts.

    All arguments are optional: only what is given is checked. Nothing is run or changed.

    Args:
        model: The module that is trained.
        optimizer: One optimizer, or all of them in a sequence.
        scaler: A ``GradScaler``, ours or PyTorch's.
        scheduler: A schedule of learning rates, or several in a sequence.
        step_fn: The function that does a step, or the whole loop: its source is read, and the
            model, optimizers, scaler and schedules that it uses by name are checked where they
            are not given.
        dtype: The lower precision of autocast, ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        The findings, the worst first, in a sequence whose ``str()`` is the text; it has ``worst``
        and ``to_json()``. ``docs/doctor.md`` has a section on each id.

    Raises:
        TypeError: An argument is of the wrong kind.

    Sync: none.

    Example:
        >>> model = torch.nn.Linear(4, 1).half()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> found = doctor(model, optimizer, dtype=torch.float16)
        >>> [finding.id for finding in found]
        ['fp16-without-scaler', 'half-parameters']
        >>> found.worst, found[1].names
        ('bad', ('weight', 'bias'))
        >>> print(found[0].cure)
        scale the loss; or use bfloat16, which needs no scaler, where it is fast
    """
    given = Training(
        _checked("model", model, nn.Module),
        tuple(_several("optimizer", optimizer, Optimizer)),
        _checked("scaler", scaler, *_SCALERS),
        tuple(_several("scheduler", scheduler)),
        _checked("dtype", dtype, torch.dtype),
    )
    read: list[Finding] = []
    if step_fn is not None:
        if not callable(step_fn):
            raise TypeError(f"doctor(step_fn={step_fn!r}): pass the function that does a step")
        given, read = _with_function(given, step_fn)
    return Checkup([*objects.findings(given), *_flags(given), *read])


def _with_function(given: Training, step_fn: Callable[..., Any]) -> tuple[Training, list[Finding]]:
    """Read a function, and complete the training with objects that it uses by name."""
    from halfstep._doctor import source  # `import halfstep` does not need it

    try:
        read = source.check_function(step_fn)
        known = list(source.known_to(step_fn).values())
        makes_scaler = source.may_scale(step_fn)
    except (OSError, SyntaxError, TypeError) as error:
        return given, [
            Finding(
                "source-not-read",
                f"the source of {step_fn!r} cannot be read: {error}",
                "pass a function that is written in a file or a notebook",
            )
        ]
    models = [each for each in known if isinstance(each, nn.Module)]
    scalers = [each for each in known if isinstance(each, _SCALERS)]
    return (
        replace(
            given,
            model=models[0] if given.model is None and len(models) == 1 else given.model,
            optimizers=given.optimizers or _of(known, Optimizer),
            scaler=scalers[0] if given.scaler is None and len(scalers) == 1 else given.scaler,
            schedulers=given.schedulers or _of(known, torch.optim.lr_scheduler.LRScheduler),
            makes_scaler=makes_scaler,
        ),
        read,
    )


def _of(objects: Iterable[object], *kinds: type) -> tuple[Any, ...]:
    return tuple({id(each): each for each in objects if isinstance(each, kinds)}.values())


def _flags(training: Training) -> Iterator[Finding]:
    device = next((param.device for param in training.held), None)
    if device is None:
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    yield from flags.findings(device.type, training.dtype, capability)


def _checked(name: str, value: Any, *kinds: type) -> Any:
    if value is not None and not isinstance(value, kinds):
        wanted = " or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        raise TypeError(f"doctor({name}={type(value).__name__}): pass a {wanted}")
    return value


def _several(name: str, value: Any, *kinds: type) -> Iterator[Any]:
    if value is None:
        return
    for each in value if isinstance(value, list | tuple) else (value,):
        yield _checked(name, each, *kinds) if kinds else each
