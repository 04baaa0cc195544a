"""Steps of a scaler whose methods a subclass or a patch has replaced, as in torch.amp.

Existing code overrides methods that PyTorch's scaler calls on itself: to allow float16 gradients,
to share found_inf between ranks, or to decide itself whether to step. Such a scaler calls them in
PyTorch's order and with PyTorch's arguments, and uses what they return. Sync: one for each step, as
in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep._common.nested import tensors_in
from halfstep._pytorch.amp import reciprocal_of
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler import scalars
from halfstep._scaler.gradients import collect, parameters
from halfstep._scaler.iteration import Stage, Step, nothing_checked
from halfstep._scaler.optimizers import name, step_with_scale
from halfstep._scaler.step import add_check, gather, keep, largest_of, remember, require_not_stepped
from halfstep.errors import CallOrderError

if TYPE_CHECKING:
    from halfstep._scaler.scaler import GradScaler


def refuse_overrides(scaler: GradScaler, call: str) -> None:
    """Raise if a call that unscales by itself would leave an override out."""
    left_out = scaler._overridden() & {"unscale_", "_unscale_grads_"}
    if left_out:
        raise CallOrderError(
            f"{call} unscales by itself and would leave out {', '.join(sorted(left_out))}(), which "
            f"{type(scaler).__name__} overrides. Call scaler.unscale_(optimizer) instead"
        )


def is_ready(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of an optimizer are still scaled."""
    step = scaler._engine.iteration.step_of(optimizer)
    return step is None or step.stage is Stage.SCALED


@keep_out_of_graphs
def create_scale(scaler: GradScaler, outputs: Any) -> None:
    """Create the scale on the device of the first loss, if the method for it is overridden."""
    first = next(iter(tensors_in([outputs])), None)
    if first is not None and "_lazy_init_scale_growth_tracker" in scaler._overridden():
        scaler._lazy_init_scale_growth_tracker(first.device)


def unscale_(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients of an optimizer with the overridden ``_unscale_grads_``."""
    engine = scaler._engine
    earlier = engine.iteration.step_of(optimizer)
    engine.require_scaled(optimizer, earlier)
    scaler._check_scale_growth_tracker("unscale_")
    step = gather(engine, "unscale_", optimizer, earlier)
    if step.multiplier is None:
        raise CallOrderError(
            f"unscale_({name(optimizer)}): some of its gradients have been unscaled with another "
            "optimizer, and _unscale_grads_(), which is overridden, would divide them again. Give "
            "each parameter to one optimizer; give this iteration up with "
            "update(new_scale=scaler.get_scale())"
        )
    amax = largest_of(step) if step.loss_scale.wants_amax else None
    scale = step.loss_scale.tensor
    found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
    found = scaler._unscale_grads_(optimizer, reciprocal_of(scale), found_inf, False)
    if found or step.ranks.is_together:
        add_check(step, flags_of(found), amax)
        step.multiplier = None
        keep(engine.iteration, step, Stage.UNSCALED)


def flags_of(found: Mapping[torch.device, Tensor]) -> dict[torch.device, Tensor]:
    """Return found_inf flags as float32 scalars, in the same memory if they are float32."""
    return {device: flag.detach().reshape(()).float() for device, flag in found.items()}


def step(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_norm: float | None,
    *,
    is_fused: bool,
) -> Any:
    """Step like torch.amp; see ``GradScaler.step``."""
    engine = scaler._engine
    earlier = engine.iteration.step_of(optimizer)
    if earlier is not None:
        require_not_stepped(earlier)
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
    checked = engine.iteration.step_of(optimizer)
    if checked is None or not checked.checks:
        raise nothing_checked(optimizer)
    stepped: list[bool] = []
    with ExitStack() as stack:
        if isinstance(optimizer, torch.optim.Optimizer):
            hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
            stack.callback(hook.remove)
        if is_fused:
            device = checked.loss_scale.device
            found_inf = scalars.combine(list(state["found_inf_per_device"].values()), device)
            make_step = partial(optimizer.step, *args, **kwargs)
            scale = scaler._get_scale_async() if ready else None
            result = step_with_scale(
                optimizer, make_step, scale, scalars.as_tensor(found_inf, device)
            )
        else:
            result = scaler._maybe_opt_step(optimizer, state, *args, **kwargs)
    gradients = collect(parameters(optimizer))
    done = Step(optimizer, checked.loss_scale, gradients, checks=checked.checks)
    done.decide()
    if not is_fused and isinstance(optimizer, torch.optim.Optimizer):
        done.found_inf = done.skip = 0.0 if stepped else 1.0
    remember(engine, optimizer, done, engine.journal.memory(optimizer), is_fused=is_fused)
    return result
