"""What existing code reads, writes and overrides of torch.amp.GradScaler, by its private names.

A scaler with overridden methods steps as torch.amp's: it calls what PyTorch's scaler calls on
itself, in PyTorch's order and with PyTorch's arguments, and uses what is returned. Existing code
overrides these methods to allow float16 gradients, to share found_inf between ranks, or to decide
itself whether to step. Sync: one for each such step, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep._gradients import scalars
from halfstep._gradients.gradients import NONE, Flags, collect, overflows_when_divided, parameters
from halfstep._gradients.optimizers import name, step_with_scale
from halfstep._pytorch import amp
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Check, Step, found_inf_by_device, nothing_checked
from halfstep._scaler.step import (
    gather,
    new_check,
    refuse_half,
    remember,
    remember_failure,
    require_in_time,
    require_known,
)
from halfstep.errors import CallOrderError

READY = OptState.READY


class OptimizerState(Mapping[str, Any]):
    """A live view of the state that torch.amp keeps of one optimizer until ``update``."""

    def __init__(self, engine: Engine, key: int) -> None:
        self._engine, self._key = engine, key

    def __getitem__(self, key: str) -> Any:
        step = self._engine.iteration.steps.get(self._key)
        if key == "stage":
            return READY if step is None else step.stage
        if key == "found_inf_per_device":
            return MappingProxyType({} if step is None else found_inf_by_device(step.checks))
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Accept a stage or flags from a subclass with its own step."""
        iteration = self._engine.iteration
        step = iteration.steps.get(self._key)
        stages = [stage for stage in OptState if value in (stage, stage.value)]
        if value == {} or (key == "stage" and stages == [READY]):
            iteration.forget(self._key)
        elif key == "found_inf_per_device" and isinstance(value, Mapping):
            optimizer = None if step is None else step.optimizer
            self._engine.scale_of_iteration("step", optimizer)  # raises before the first loss
            _keep_check(self._engine, self._key, optimizer, Check(flags_of(value)))
        elif key == "stage" and step is not None and stages:
            step = step._replace(stage=stages[0], num_losses=iteration.num_losses)
            iteration.steps[self._key] = step
        else:
            raise TypeError(
                f"GradScaler._per_optimizer_states[...][{key!r}] = {value!r}: only the stage, an "
                "OptState, and found_inf_per_device, a dict of flags by device, can be set, the "
                "flags first"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(("stage", "found_inf_per_device"))

    def __len__(self) -> int:
        return 2


def _refuse(*args: object) -> NoReturn:
    raise TypeError(
        "GradScaler._per_optimizer_states: states can be read and removed, or replaced by an empty "
        "dict at the end of an iteration. To give one up, call "
        "scaler.update(new_scale=scaler.get_scale())"
    )


class OptimizerStates(dict[int, OptimizerState]):
    """A live view of the states that torch.amp keeps of all optimizers, by ``id``.

    A state can be removed: what was found is forgotten, and the gradients count as scaled.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__({key: OptimizerState(engine, key) for key in engine.iteration.steps})
        self._engine = engine

    def __missing__(self, key: int) -> OptimizerState:
        return OptimizerState(self._engine, key)

    def __delitem__(self, key: int) -> None:
        self.pop(key)

    def pop(self, key: int, *default: Any) -> Any:
        """Forget what was found for an optimizer; return its state or the default."""
        self._engine.iteration.forget(key)
        return super().pop(key, *default)

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    __setitem__ = popitem = update = setdefault = _refuse


def _if_created(attribute: str) -> Callable[[Any], Tensor | None]:
    """Return a function that reads a tensor of the scale, None before the first loss."""

    def read(scaler: Any) -> Tensor | None:
        scale = scaler._engine.loss_scale
        return getattr(scale, attribute) if scale.is_created else None

    return read


def _set_scale(scaler: Any, value: Any) -> None:
    if value is None:
        raise TypeError("GradScaler._scale = None: make a new GradScaler to start again")
    is_here = isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1
    new_scale = value.item() if is_here else value
    scaler._engine.set_scale(new_scale, iteration_ends=False)


def _set_growth_tracker(scaler: Any, value: Any) -> None:
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": int(value)})


def _set_init_scale(scaler: Any, value: Any) -> None:
    scale = scaler._engine.loss_scale
    if scale.is_created:
        raise CallOrderError(
            f"GradScaler._init_scale = {value!r}: a loss has been scaled already. Call "
            "scaler.update(new_scale=...)"
        )
    scale.set(value)
    scale.first = scale.first.with_scale(scale.state.scale)


def _set_enabled(scaler: Any, value: Any) -> None:
    if value and not scaler.is_enabled():
        raise TypeError(
            "GradScaler._enabled = True: one that is switched off has no scale. Make a new "
            "GradScaler()"
        )
    if not value and scaler.is_enabled():
        scaler.update(1.0)
        scaler._is_enabled = False


def _set_states(scaler: Any, value: Any) -> None:
    """End the iteration, as a subclass with its own ``update`` does."""
    if value:
        _refuse()
    engine = scaler._engine
    if engine.loss_scale.is_created:
        engine.loss_scale.number()  # picks up what it wrote in place
        engine.loss_scale.forget_losses()
    engine.end_iteration()


def _number_of_schedule(name: str) -> property:
    return property(
        lambda scaler: getattr(scaler, f"get_{name}")(),
        lambda scaler, value: getattr(scaler, f"set_{name}")(value),
    )


class TorchAttributes:
    """Private attributes of torch.amp.GradScaler as properties of halfstep's scaler."""

    _device: str | None
    _engine: Engine
    _is_enabled: bool

    _enabled = property(lambda scaler: scaler.is_enabled(), _set_enabled)
    _scale = property(_if_created("tensor"), _set_scale)
    _growth_tracker = property(_if_created("growth_tracker"), _set_growth_tracker)
    _init_scale = property(lambda scaler: scaler._engine.loss_scale.first.scale, _set_init_scale)
    _init_growth_tracker = property(
        lambda scaler: scaler._engine.loss_scale.first.growth_tracker, _set_growth_tracker
    )
    _growth_factor = _number_of_schedule("growth_factor")
    _backoff_factor = _number_of_schedule("backoff_factor")
    _growth_interval = _number_of_schedule("growth_interval")
    _per_optimizer_states = property(lambda scaler: OptimizerStates(scaler._engine), _set_states)

    # Called by subclasses with their own unscale_ or step, and PyTorch's own.
    _check_scale_growth_tracker = amp.check_scale_growth_tracker
    _maybe_opt_step = amp.maybe_opt_step
    _get_scale_async = _if_created("tensor")

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> Flags:
        gradients = collect(parameters(optimizer))
        if not allow_fp16:
            step = Step(optimizer, self._engine.loss_scale, gradients, multiplier=1.0)
            refuse_half(self._engine, step)
        found = amp.unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
        is_here = inv_scale.device.type in scalars.READABLE
        if inv_scale.item() > 1.0 if is_here else self._engine.loss_scale.can_amplify:
            for device, flag in gradients.check().items():  # a finite one may have become inf
                found[device].clamp_(min=flag)
        return found

    def _get_growth_tracker(self: Any) -> int:
        return int(self._engine.loss_scale.read().growth_tracker)

    @keep_out_of_graphs
    def _check_inf_per_device(self: Any, optimizer: torch.optim.Optimizer) -> Flags:
        if not self._is_enabled:
            return {}
        engine, params = self._engine, parameters(optimizer)
        gradients, ranks = collect(params), engine.ranks_of("step", optimizer, params)
        if not (gradients.grads or ranks.is_together):
            return {}
        scale = engine.scale_of_iteration("step", optimizer)
        number = scale.number()  # picks up what existing code has written
        if "_unscale_grads_" in self._overridden():
            one, none = torch.ones_like(scale.tensor), torch.zeros_like(scale.tensor)
            found = flags_of(self._unscale_grads_(optimizer, one, none, True))
        else:
            found = gradients.check()
        if scale.can_amplify and self._per_optimizer_states[id(optimizer)]["stage"] is READY:
            for flag in overflows_when_divided(gradients, number):
                found[flag.device].clamp_(min=flag)
        check = new_check(Step(optimizer, scale, gradients, ranks=ranks), found)
        _keep_check(engine, id(optimizer), optimizer, check)
        return check.found_inf

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Flags:
        step = self._engine.iteration.steps.get(id(optimizer))
        return {} if step is None else found_inf_by_device(step.checks)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str | None) -> None:
        # accelerate 1.15 calls this with self._device to load an FSDP2 checkpoint.
        if not self._is_enabled:
            return
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator or torch.device("cpu") if dev is None else torch.device(dev)
        self._engine.create_scale(device)

    def _note_device(self, device: torch.device) -> None:
        self._device = self._device or device.type


def _keep_check(
    engine: Engine, key: int, optimizer: torch.optim.Optimizer | None, check: Check
) -> None:
    engine.iteration.ledger.mark(NONE, check)
    steps = engine.iteration.steps
    earlier = steps.get(key) or Step(optimizer, engine.loss_scale)
    steps[key] = earlier._replace(earlier=(check,))


# --- overridden methods ---------------------------------------------------------------------------

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
    require_in_time(engine, "unscale_", optimizer)
    scaler._check_scale_growth_tracker("unscale_")
    step = gather(engine, "unscale_", optimizer)
    if step.multiplier is None:
        raise CallOrderError(
            f"unscale_({name(optimizer)}): some of its gradients have been unscaled with another "
            "optimizer, and _unscale_grads_(), which is overridden, would divide them again. Give "
            "each parameter to one optimizer; give this iteration up with "
            "update(new_scale=scaler.get_scale())"
        )
    scale = step.loss_scale.tensor
    found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
    found = scaler._unscale_grads_(optimizer, amp.reciprocal_of(scale), found_inf, False)
    if found or step.ranks.is_together:
        step = step._replace(multiplier=None, own=new_check(step, flags_of(found)))
        engine.iteration.keep(step, OptState.UNSCALED)


def flags_of(found: Mapping[torch.device, Tensor]) -> Flags:
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
    engine, params = scaler._engine, parameters(optimizer)
    require_in_time(engine, "step", optimizer)
    require_known(engine.iteration.ledger, "step", params)
    engine.unused.use(f"step({name(optimizer)})", params)
    scaler._check_scale_growth_tracker("step")
    state = scaler._per_optimizer_states[id(optimizer)]
    is_scaled = state["stage"] is READY
    if is_scaled and is_fused:
        found = scaler._check_inf_per_device(optimizer)
        if found and not state["found_inf_per_device"]:
            state["found_inf_per_device"] = found  # the override has only returned it
    elif is_scaled:
        scaler.unscale_(optimizer)
    before = engine.iteration.steps.get(id(optimizer))
    if before is None or not before.checks:
        raise nothing_checked(optimizer)
    step = Step(optimizer, engine.loss_scale, collect(params), earlier=before.checks)
    make_step = partial(optimizer.step, *args, **kwargs)
    stepped: list[bool] | None = None
    if is_fused:
        result, step = _step_fused(scaler, make_step, step, is_scaled=is_scaled)
    else:
        with _noting_steps(optimizer) as stepped:
            result = scaler._maybe_opt_step(optimizer, state, *args, **kwargs)
    step = step._replace(gradients=collect(params)).decide()
    if stepped is not None:
        step = step._replace(skip=float(not stepped))
    remember(engine, step, engine.journal.plan(optimizer), is_fused=is_fused)
    return result


def _step_fused(
    scaler: Any, make_step: Callable[[], Any], step: Step, *, is_scaled: bool
) -> tuple[Any, Step]:
    optimizer: Any = step.optimizer
    scale, found = step.loss_scale, found_inf_by_device(step.checks)
    divisor = None
    if is_scaled:  # it will divide these gradients, and they are divided only once
        multiplier, divisor = scale.number(), scaler._get_scale_async()
        step = step._replace(scaled_by=multiplier, multiplier=multiplier, own=Check(found))
    flag = scalars.as_tensor(scalars.combine(found.values(), scale.device), scale.device)
    try:
        return step_with_scale(optimizer, make_step, divisor, flag), step
    except BaseException:
        remember_failure(scaler._engine.iteration, step)
        raise


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
