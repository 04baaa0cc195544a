"""Private attributes and methods of torch.amp.GradScaler that other code uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep._gradients.gradients import NONE, collect, parameters, refuse_float16
from halfstep._gradients.norms import overflows_when_divided
from halfstep._gradients.optimizers import name
from halfstep._gradients.scalars import READABLE
from halfstep._pytorch import amp
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import (
    Stage,
    Step,
    found_inf_by_device,
)
from halfstep._scaler.ledger import Check
from halfstep._scaler.overrides import flags_of
from halfstep.errors import CallOrderError

STAGES = {
    Stage.SCALED: OptState.READY,
    Stage.UNSCALED: OptState.UNSCALED,
    Stage.STEPPED: OptState.STEPPED,
}


class OptimizerState(Mapping[str, Any]):
    """A live view of the state that torch.amp keeps of one optimizer until ``update``."""

    def __init__(self, engine: Engine, key: int) -> None:
        self._engine, self._key = engine, key

    def __getitem__(self, key: str) -> Any:
        """Return the stage, or the found_inf flags by device."""
        step = self._engine.iteration.steps.get(self._key)
        if key == "stage":
            return STAGES[Stage.SCALED if step is None else step.stage]
        if key == "found_inf_per_device":
            return MappingProxyType({} if step is None else found_inf_by_device(step.checks))
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Accept a stage or flags from a subclass with its own step."""
        iteration = self._engine.iteration
        step = iteration.steps.get(self._key)
        stages = [ours for ours, theirs in STAGES.items() if value in (theirs, theirs.value)]
        if value == {} or (key == "stage" and stages == [Stage.SCALED]):
            iteration.forget(self._key)
        elif key == "found_inf_per_device" and isinstance(value, Mapping):
            optimizer = None if step is None else step.optimizer
            scale = self._engine.scale_of_iteration("step", optimizer)
            check = Check(scale, flags_of(value))
            _keep_check(self._engine, self._key, optimizer, check)
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
        """Yield the two keys."""
        return iter(("stage", "found_inf_per_device"))

    def __len__(self) -> int:
        """Return 2."""
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
        """Return the state of an unused optimizer."""
        return OptimizerState(self._engine, key)

    def __delitem__(self, key: int) -> None:
        """Forget what was found for an optimizer."""
        super().__delitem__(key)
        self._engine.iteration.forget(key)

    def pop(self, key: int, *default: Any) -> Any:
        """Forget what was found for an optimizer; return its state or the default."""
        self._engine.iteration.forget(key)
        return super().pop(key, *default)

    def clear(self) -> None:
        """Forget what was found for all optimizers."""
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

    _maybe_opt_step = amp.maybe_opt_step
    _get_scale_async = _if_created("tensor")

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        if not allow_fp16:
            gradients = collect(parameters(optimizer))
            if torch.float16 in gradients.dtypes:
                names = self._engine.names.of(gradients.params, optimizer)
                refuse_float16(gradients, name(optimizer), names)
        found = amp.unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)
        if inv_scale.device.type in READABLE:
            can_amplify = inv_scale.item() > 1.0
        else:
            can_amplify = self._engine.loss_scale.can_amplify
        if can_amplify:  # a finite gradient may have become inf
            for device, flag in collect(parameters(optimizer)).check().items():
                found[device].clamp_(min=flag)
        return found

    def _get_growth_tracker(self: Any) -> int:
        return int(self._engine.loss_scale.read().growth_tracker)

    def _check_scale_growth_tracker(self: Any, funcname: str) -> tuple[Tensor, Tensor]:
        # Called by subclasses with their own unscale_ or step.
        if self._scale is None:
            raise AssertionError(
                f"Attempted {funcname} but _scale is None. This may indicate your script did not "
                "use scaler.scale(loss or outputs) earlier in the iteration."
            )
        return self._scale, self._growth_tracker

    @keep_out_of_graphs
    def _check_inf_per_device(
        self: Any, optimizer: torch.optim.Optimizer
    ) -> dict[torch.device, Tensor]:
        return _check(self, optimizer) if self._is_enabled else {}

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        step = self._engine.iteration.step_of(optimizer)
        return {} if step is None else found_inf_by_device(step.checks)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str | None) -> None:
        # accelerate 1.15 calls this with self._device to load an FSDP2 checkpoint.
        if not self._is_enabled:
            return
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator or torch.device("cpu") if dev is None else torch.device(dev)
        self._engine.create_scale(device)


def _check(scaler: Any, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
    """Check for inf and NaN without changes, for an optimizer that unscales by itself."""
    engine: Engine = scaler._engine
    params = parameters(optimizer)
    gradients = collect(params)
    ranks = engine.ranks_of("step", optimizer, params)
    if not (gradients.grads or ranks.is_together):
        return {}
    scale = engine.scale_of_iteration("step", optimizer)
    earlier = engine.iteration.step_of(optimizer)
    is_scaled = earlier is None or earlier.stage is Stage.SCALED
    multiplier = scale.number() if is_scaled else 1.0
    if "_unscale_grads_" in scaler._overridden():
        one, none = torch.ones_like(scale.tensor), torch.zeros_like(scale.tensor)
        found = flags_of(scaler._unscale_grads_(optimizer, one, none, True))
    else:
        found = gradients.check()
    if is_scaled and scale.can_amplify:
        for flag in overflows_when_divided(gradients, multiplier):
            if flag.device in found:
                found[flag.device].clamp_(min=flag)
    check = Check(scale, found)
    check.agreement = ranks.agree_on(check, has_gradients=bool(gradients.grads))
    _keep_check(engine, id(optimizer), optimizer, check)
    return check.found_inf


def _keep_check(
    engine: Engine, key: int, optimizer: torch.optim.Optimizer | None, check: Check
) -> None:
    engine.iteration.ledger.mark(NONE, check)
    steps = engine.iteration.steps
    earlier = steps.get(key) or Step(optimizer, engine.loss_scale)
    steps[key] = earlier._replace(earlier=(check,))
