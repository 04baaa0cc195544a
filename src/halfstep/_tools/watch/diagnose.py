"""The public call: a diagnosis of one step, or of the bad steps of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

from torch import nn

from halfstep._scaler import GradScaler
from halfstep._tools.diagnose.diagnose import SECONDS, diagnose_step
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.watch.watch import Watch


@overload
def diagnose(
    step_fn: Callable[[], object], /, *, model: nn.Module | None = None, seconds: float = SECONDS
) -> Diagnosis: ...
@overload
def diagnose(
    scaler: GradScaler,
    /,
    *,
    model: nn.Module | None = None,
    tell: Callable[[Diagnosis, int], object] | None = None,
    seconds: float = SECONDS,
) -> Watch: ...
def diagnose(
    step_or_scaler: Callable[[], object] | GradScaler,
    /,
    *,
    model: nn.Module | None = None,
    tell: Callable[[Diagnosis, int], object] | None = None,
    seconds: float = SECONDS,
) -> Diagnosis | Watch:
    """Name the op, the module, the line, the cause and the cure of a step that goes bad.

    **A step**: ``diagnose(step_fn)`` replays it now. It is run several times, op by op, from the
    current state. Afterwards, parameters, buffers, gradients, random generators, the scaler and the
    attributes of modules are restored bit for bit. Schedules do not step. If all is finite, the
    steps of optimizers in ``step_fn`` are carried out in a replay, too, and undone. Other
    effects of ``step_fn``, such as printing or reading files, happen in each run, so read the batch
    outside of it.

    **A loop**: ``with diagnose(scaler):`` around it replays a step at once if its loss is not
    finite, or if it is skipped beyond what dynamic scaling normally skips at its start and after
    growth. With a disabled scaler, it watches the steps of plain optimizers.

    Args:
        step_or_scaler: A function without arguments that runs the step: forward, loss and backward,
            under autocast and with a scaler as in training. It may step optimizers and accumulate
            several batches. Or the scaler of the loop.
        model: The model, for the names of modules. By default, the first module with parameters
            that is called.
        tell: With a scaler, called with each new diagnosis and the number of the step, counted from
            1. By default, a :class:`halfstep.errors.DiagnosisWarning` is issued.
        seconds: The time of this thread, with a tenth of that in which it waits, after which no
            further replay of a step begins. What was found until then is returned, with a note.

    Returns:
        For a step, the diagnosis; ``print`` it. For a scaler, a context manager; its ``found``
        lists the diagnoses, one for each place.

    Raises:
        TypeError: The first argument is neither, ``model`` is not a module, or ``tell`` is not
            callable or given with a step.
        CallOrderError: A trace is running.
        RanksError: The step needs other ranks: the model is sharded, or the step calls a
            collective.
        Exception: Any error of ``step_fn``, if no value was bad before it. One about dtypes, also
            one that ends the block, has an explanation as a note: its tensors, where they come
            from, and what was tried.

    Sync: for a step, one for each op; for a loop, one for each step.

    Example:
        >>> import halfstep, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        >>> _ = nn.init.constant_(model[1].weight, 5e4)
        >>> x = torch.ones(2, 4)
        >>> def step():
        ...     with halfstep.autocast("cpu", torch.float16):
        ...         model(x).float().mean().backward()
        >>> _ = nn.init.constant_(model[0].bias, 10.0)
        >>> found = diagnose(step)
        >>> found.verdict, found.bad.name, found.bad.module
        ('range', 'linear', '1')
        >>> found.cure.policy, found.cure.is_finite
        ('standard; linear@1:fp32', True)

        Around a loop:

        >>> model = nn.Linear(4, 1)
        >>> optimizer, scaler = torch.optim.SGD(model.parameters()), halfstep.GradScaler()
        >>> with diagnose(scaler, model=model, tell=lambda found, step: print(step, found.verdict)):
        ...     for batch in (torch.ones(2, 4), torch.full((2, 4), float("nan"))):
        ...         optimizer.zero_grad()
        ...         scaler.scale(model(batch).mean()).backward()
        ...         _ = scaler.step(optimizer)
        ...         scaler.update()
        2 data
    """
    if not (model is None or isinstance(model, nn.Module)):
        raise TypeError(f"diagnose(model={type(model).__name__}): pass a torch.nn.Module")
    if isinstance(step_or_scaler, GradScaler):
        scaler = step_or_scaler
        return Watch(scaler if scaler.is_enabled() else None, model, tell, seconds)
    # A model can be called too, but not without a batch.
    if isinstance(step_or_scaler, nn.Module) or not callable(step_or_scaler):
        raise TypeError(
            f"diagnose({type(step_or_scaler).__name__}): pass the function that runs a step, "
            "without calling it: diagnose(step), diagnose(lambda: step(batch)) or diagnose(step, "
            "model=model); or, around a loop, its halfstep.GradScaler"
        )
    if tell is not None:
        raise TypeError(
            "diagnose(step, tell=...): the diagnosis of a step is returned; tell= is for a loop: "
            "with diagnose(scaler, tell=...):"
        )
    return diagnose_step(step_or_scaler, model, seconds)
