"""Steps of a scaler whose methods a subclass or a patch has replaced, as in torch.amp.

Existing code overrides methods that PyTorch's scaler calls on itself: to allow float16 gradients,
to share found_inf between ranks, or to decide itself whether to step. Such a scaler calls them in
PyTorch's order and with PyTorch's arguments, and uses what they return. Sync: one for each step, as
in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from halfstep._common.nested import tensors_in
from halfstep._gradients import scalars
from halfstep._gradients.gradients import collect, parameters
from halfstep._gradients.optimizers import name, step_with_scale
from halfstep._pytorch.amp import reciprocal_of
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler.iteration import (
    Checked,
    Decided,
    Gathered,
    Stage,
    found_inf_by_device,
    nothing_checked,
)
from halfstep._scaler.ledger import GradientCheck
from halfstep._scaler.step import (
    gather,
    keep,
    new_check,
    remember,
    remember_failure,
    require_known,
    require_not_stepped,
    require_scaled,
)
from halfstep.errors import CallOrderError


def refuse_overrides(scaler: Any, call: str) -> None:
    """Raise if a call that unscales by itself would leave an override out."""
    left_out = scaler._overridden() & {"unscale_", "_unscale_grads_"}
    if left_out:
        raise CallOrderError(
            f"{call} unscales by itself and would leave out {', '.join(sorted(left_out))}(), which "
            f"{type(scaler).__name__} overrides. Call scaler.unscale_(optimizer) instead"
        )


def is_ready(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of an optimizer are still scaled."""
    step = scaler._engine.iteration.step_of(optimizer)
    return step is None or step.stage is Stage.SCALED


@keep_out_of_graphs
def create_scale(scaler: Any, outputs: Any) -> None:
    """Create the scale on the device of the first loss, if the method for it is overridden."""
    first = next(iter(tensors_in([outputs])), None)
    if first is not None and "_lazy_init_scale_growth_tracker" in scaler._overridden():
        scaler._lazy_init_scale_growth_tracker(first.device)


def unscale_(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients of an optimizer with the overridden ``_unscale_grads_``."""
    engine = scaler._engine
    earlier = engine.iteration.step_of(optimizer)
    require_scaled(optimizer, earlier)
    scaler._check_scale_growth_tracker("unscale_")
    gathered = gather(engine, "unscale_", optimizer, parameters(optimizer), optimizer)
    if gathered.multiplier is None:
        raise CallOrderError(
            f"unscale_({name(optimizer)}): some of its gradients have been unscaled with another "
            "optimizer, and _unscale_grads_(), which is overridden, would divide them again. Give "
            "each parameter to one optimizer; give this iteration up with "
            "update(new_scale=scaler.get_scale())"
        )
    scale = gathered.loss_scale.tensor
    found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
    found = scaler._unscale_grads_(optimizer, reciprocal_of(scale), found_inf, False)
    if found or gathered.ranks.is_together:
        checked = Checked(gathered, None, new_check(gathered, flags_of(found)))
        keep(engine.iteration, checked, Stage.UNSCALED)


def flags_of(found: Mapping[torch.device, Tensor]) -> dict[torch.device, Tensor]:
    """Return found_inf flags as float32 scalars, in the same memory if they are float32."""
    return {device: flag.detach().reshape(()).float() for device, flag in found.items()}


def step(
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_norm: float | None,
    *,
    is_fused: bool,
) -> Any:
    """Step like torch.amp; see ``GradScaler.step``."""
    engine = scaler._engine
    require_not_stepped(engine.iteration.step_of(optimizer))
    require_known(engine.iteration.ledger, "step", parameters(optimizer))
    scaler._check_scale_growth_tracker("step")
    if max_norm is not None:
        scaler.clip_grad_norm_(optimizer, max_norm)
    ready = is_ready(scaler, optimizer)
    if ready and is_fused:
        found = scaler._check_inf_per_device(optimizer)
        state: Any = scaler._per_optimizer_states[id(optimizer)]
        if found and not state["found_inf_per_device"]:
            state["found_inf_per_device"] = found  # the override has only returned it
    elif ready:
        scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    before = engine.iteration.step_of(optimizer)
    if before is None or not before.checks:
        raise nothing_checked(optimizer)
    gathered = Gathered(
        optimizer,
        engine.loss_scale,
        collect(parameters(optimizer)),
        engine.loss_scale.number() if is_fused and ready else None,
        before.checks,
        measured=before.measured,  # by clip_grad_norm_()
    )
    own = None
    if gathered.multiplier is not None:
        # The optimizer will divide these gradients, and they are divided only once.
        own = GradientCheck(gathered.loss_scale, found_inf_by_device(gathered.checks))
    checked = Checked(gathered, gathered.multiplier, own)
    if is_fused:
        scale = scaler._get_scale_async() if ready else None
        make_step = partial(optimizer.step, *args, **kwargs)
        found = state["found_inf_per_device"]
        try:
            result = _step_fused(optimizer, make_step, checked, scale, found)
        except BaseException:
            remember_failure(engine.iteration, checked)
            raise
        decided = checked.decide()
    else:
        make_step = partial(scaler._maybe_opt_step, optimizer, state, *args, **kwargs)
        result, decided = _step_plain(optimizer, make_step, checked)
    now = replace(checked.gathered, gradients=collect(parameters(optimizer)))
    decided = replace(decided, checked=replace(checked, gathered=now))
    remember(engine, optimizer, decided, engine.journal.memory(optimizer), is_fused=is_fused)
    return result


def _step_fused(
    optimizer: torch.optim.Optimizer,
    make_step: Callable[[], Any],
    checked: Checked,
    scale: Tensor | None,
    found: Mapping[torch.device, Tensor],
) -> Any:
    """Step with an optimizer that divides and skips by itself."""
    device = checked.gathered.loss_scale.device
    skip = scalars.combine(list(found.values()), device)
    return step_with_scale(optimizer, make_step, scale, scalars.as_tensor(skip, device))


def _step_plain(
    optimizer: torch.optim.Optimizer, make_step: Callable[[], Any], checked: Checked
) -> tuple[Any, Decided]:
    """Step with ``_maybe_opt_step``. Sync: none of its own."""
    stepped: list[bool] = []
    with _noting_steps(optimizer, stepped) as is_noted:
        result = make_step()
    decided = checked.decide()
    if is_noted:
        decided = replace(decided, skip=0.0 if stepped else 1.0)
    return result, decided


@contextmanager
def _noting_steps(optimizer: Any, stepped: list[bool]) -> Iterator[bool]:
    """Append to ``stepped`` when ``step`` is called on an optimizer or its class.

    Wrappers may have no hooks, and a ``step`` that was replaced may not call them. Yields whether a
    call would be noted: not if there are neither hooks nor a ``__dict__``.
    """
    made, of_object = optimizer.step, getattr(optimizer, "__dict__", {})
    before = of_object.get("step")

    @wraps(made)
    def noting(*args: Any, **kwargs: Any) -> Any:
        stepped.append(True)
        return made(*args, **kwargs)

    with ExitStack() as stack:
        hook = None
        with suppress(AttributeError):
            hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
            stack.callback(hook.remove)
        of_object["step"] = noting
        try:
            yield optimizer.step is noting or hook is not None
        finally:
            if of_object.get("step") is noting:
                del of_object["step"]
                of_object |= {} if before is None else {"step": before}
