"""Steps of a scaler whose methods a subclass or a patch has replaced, as in torch.amp.

Existing code overrides methods that PyTorch's scaler calls on itself: to allow float16 gradients,
to share found_inf between ranks, or to decide itself whether to step. Such a scaler calls them in
PyTorch's order and with PyTorch's arguments, and uses what they return. Sync: one for each step, as
in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from halfstep._gradients import scalars
from halfstep._gradients.gradients import collect, parameters
from halfstep._gradients.optimizers import name, step_with_scale
from halfstep._pytorch.amp import reciprocal_of
from halfstep._scaler.iteration import (
    Stage,
    Step,
    found_inf_by_device,
    nothing_checked,
)
from halfstep._scaler.ledger import Check
from halfstep._scaler.step import (
    gather,
    new_check,
    remember,
    remember_failure,
    require_known,
    require_not_stepped,
    require_scaled,
)
from halfstep.errors import CallOrderError

CLIP = (
    "call scaler.unscale_(optimizer) and torch.nn.utils.clip_grad_norm_() before "
    "scaler.step(optimizer)"
)
NO_CLOSURE = "call scaler.scale(loss).backward() before scaler.step(optimizer), without a closure"


def refuse(scaler: Any, call: str, cure: str) -> None:
    """Raise if methods are overridden, for a call that torch.amp's scaler does not have."""
    overridden = scaler._overridden()
    if overridden:
        raise CallOrderError(
            f"{call}: {type(scaler).__name__} overrides {', '.join(sorted(overridden))}(), so it "
            f"steps as torch.amp's scaler, which does not have this. Instead, {cure}"
        )


def unscale_(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients of an optimizer with the overridden ``_unscale_grads_``."""
    engine = scaler._engine
    earlier = engine.iteration.step_of(optimizer)
    require_scaled(optimizer, earlier)
    scaler._check_scale_growth_tracker("unscale_")
    step = gather(engine, "unscale_", optimizer, parameters(optimizer), optimizer)
    if step.multiplier is None:
        raise CallOrderError(
            f"unscale_({name(optimizer)}): some of its gradients have been unscaled with another "
            "optimizer, and _unscale_grads_(), which is overridden, would divide them again. Give "
            "each parameter to one optimizer; give this iteration up with "
            "update(new_scale=scaler.get_scale())"
        )
    scale = step.loss_scale.tensor
    found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
    found = scaler._unscale_grads_(optimizer, reciprocal_of(scale), found_inf, False)
    if found or step.ranks.is_together:
        step = step._replace(multiplier=None, own=new_check(step, flags_of(found)))
        engine.iteration.keep(step, Stage.UNSCALED)


def flags_of(found: Mapping[torch.device, Tensor]) -> dict[torch.device, Tensor]:
    """Return found_inf flags as float32 scalars, in the same memory if they are float32."""
    return {device: flag.detach().reshape(()).float() for device, flag in found.items()}


def step(
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_fused: bool,
) -> Any:
    """Step like torch.amp; see ``GradScaler.step``."""
    engine = scaler._engine
    params = parameters(optimizer)
    earlier = engine.iteration.step_of(optimizer)
    require_not_stepped(earlier)
    require_known(engine.iteration.ledger, "step", params)
    engine.unused.use(f"step({name(optimizer)})", params)
    scaler._check_scale_growth_tracker("step")
    is_scaled = earlier is None or earlier.stage is Stage.SCALED
    state = scaler._per_optimizer_states[id(optimizer)]
    if is_scaled and is_fused:
        found = scaler._check_inf_per_device(optimizer)
        if found and not state["found_inf_per_device"]:
            state["found_inf_per_device"] = found  # the override has only returned it
    elif is_scaled:
        scaler.unscale_(optimizer)
    before = engine.iteration.step_of(optimizer)
    if before is None or not before.checks:
        raise nothing_checked(optimizer)
    scale, multiplier, own = engine.loss_scale, None, None
    if is_fused and is_scaled:
        # The optimizer will divide these gradients, and they are divided only once.
        multiplier = scale.number()
        own = Check(scale, found_inf_by_device(before.checks))
    step = Step(optimizer, scale, collect(params), multiplier, multiplier, before.checks, own)
    skip: float | None = None
    if is_fused:
        divisor = scaler._get_scale_async() if is_scaled else None
        flag = scalars.combine(list(state["found_inf_per_device"].values()), scale.device)
        flag = scalars.as_tensor(flag, scale.device)
        try:
            result = step_with_scale(
                optimizer, partial(optimizer.step, *args, **kwargs), divisor, flag
            )
        except BaseException:
            remember_failure(engine.iteration, step)
            raise
    else:
        with _noting_steps(optimizer) as stepped:
            result = scaler._maybe_opt_step(optimizer, state, *args, **kwargs)
        skip = None if stepped is None else float(not stepped)
    step = step._replace(gradients=collect(params)).decide()
    if skip is not None:
        step = step._replace(skip=skip)
    remember(engine, optimizer, step, engine.journal.plan(optimizer), is_fused=is_fused)
    return result


@contextmanager
def _noting_steps(optimizer: Any) -> Iterator[list[bool] | None]:
    """Yield a list that gets an item when ``optimizer.step`` is called, None if that is not seen.

    Wrappers may have no hooks, and a ``step`` that was replaced may not call them.
    """
    of_object = getattr(optimizer, "__dict__", None)
    if of_object is None:
        yield None
        return
    made, before, stepped = optimizer.step, of_object.get("step"), list[bool]()

    @wraps(made)
    def noting(*args: Any, **kwargs: Any) -> Any:
        stepped.append(True)
        return made(*args, **kwargs)

    of_object["step"] = noting
    try:
        yield stepped
    finally:
        if of_object.get("step") is noting:
            del of_object["step"]
            of_object |= {} if before is None else {"step": before}
