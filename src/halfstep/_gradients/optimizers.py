"""Optimizers: containers and their members, parameter names, and the protocols for the scale."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from halfstep._common.module_names import without_wrappers
from halfstep._pytorch.devices import facts, to_device
from halfstep._pytorch.optim import has_step_hooks, replace_method
from halfstep.errors import CallOrderError

HANDLES_SCALE = "_step_supports_amp_scaling"

HOLDERS = ("optimizers", "chained_optimizers")  # in which containers keep their optimizers


def name(optimizer: object) -> str:
    """Return the optimizer's name in error messages: its class name."""
    return type(optimizer).__name__


def is_optimizer(value: object) -> bool:
    """Return whether an object has parameter groups or holds optimizers."""
    return hasattr(value, "param_groups") or any(
        isinstance(_attribute(value, holder), Iterable) for holder in HOLDERS
    )


def require_optimizer(call: str, optimizer: object) -> None:
    """Raise TypeError if the argument of a call is not an optimizer."""
    if not is_optimizer(optimizer):
        raise TypeError(
            f"{call}({name(optimizer)}): pass the optimizer, such as torch.optim.SGD(...), a "
            "wrapper that has its param_groups, or a container that has several in `optimizers`"
        )
    if hasattr(optimizer, "param_groups"):
        return
    for each in _reached(optimizer):
        if not is_optimizer(each):
            raise TypeError(
                f"{call}({name(optimizer)}): it holds a {name(each)}, which has no param_groups, "
                "so it is unknown whose gradients it uses. Give one of the two param_groups"
            )


# --- containers -----------------------------------------------------------------------------------


def members(optimizer: Any) -> list[Any]:
    """Return an optimizer and all that it holds, each once, except those without groups."""
    return [each for each in _reached(optimizer) if hasattr(each, "param_groups")]


def makes_step_of(stepped: Any, optimizer: Any) -> bool:
    """Return whether stepping the first steps the second: itself, wrapped by it or held by it."""
    groups = getattr(optimizer, "param_groups", None)
    return stepped is optimizer or any(
        member is optimizer or member.param_groups is groups for member in members(stepped)
    )


def _reached(optimizer: Any) -> list[Any]:
    """Return an optimizer and all that it holds at any depth, each once."""
    reached = [optimizer]
    seen = {id(optimizer)}
    for each in reached:  # grows in the loop
        for holder in HOLDERS:
            for held in _steppable(_attribute(each, holder)):
                if id(held) not in seen:
                    seen.add(id(held))
                    reached.append(held)
    return reached


def _attribute(optimizer: Any, holder: str) -> Any:
    """Return the value of a holder attribute; None if it is missing or reading it fails."""
    of_class = getattr(type(optimizer), holder, None)
    # A list in a class is a registry of all instances, not the contents of any of them.
    if of_class is not None and not hasattr(of_class, "__get__"):
        return getattr(optimizer, "__dict__", {}).get(holder)
    try:
        return getattr(optimizer, holder, None)
    except Exception:
        return None


def _steppable(value: object) -> Iterator[Any]:
    """Yield the objects that have a ``step``, in lists and dicts at any depth."""
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | torch.Tensor):
        for each in value:
            if hasattr(each, "step"):
                yield each
            else:
                yield from _steppable(each)


# --- replaced methods -----------------------------------------------------------------------------


class Replacements:
    """Methods that one feature replaces on an optimizer; its original ``step`` alone is an error.

    They are replaced on the instance, as schedulers and accelerate do it. Step hooks are not enough
    for what must also be done after a step that raises.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, feature: str, harm: str) -> None:
        self._feature, self._harm = feature, harm  # the function, and what the original would do
        self._num_calls = 0  # running calls of replaced methods
        _REPLACED.setdefault(optimizer, weakref.WeakSet()).add(self)
        self._hook: Any = None
        with suppress(AttributeError):  # containers and many wrappers have no hooks
            self._hook = optimizer.register_step_pre_hook(self._refuse_original)

    def put(
        self, optimizer: torch.optim.Optimizer, method: str, call: Callable[..., Any]
    ) -> FunctionType:
        """Replace a method by ``call(optimizer, ...)``; return the function behind it."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_calls += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._num_calls -= 1

        replace_method(optimizer, method, counted)
        return counted  # type: ignore[return-value]

    @property
    def is_called(self) -> bool:
        """Whether one of the replaced methods is running, or the original ``step`` is allowed."""
        return self._num_calls > 0

    def allow_original(self) -> None:
        self._num_calls += 1
        if self._hook is not None:
            self._hook.remove()

    def _refuse_original(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise if the original ``step`` is called instead of its replacement.

        With a scaler, accelerate saves the ``step`` that it finds, calls it and puts it back.
        """
        if not self.is_called:
            raise CallOrderError(
                f"step({name(optimizer)}): this is the step from before {self._feature}(), which "
                f"{self._harm}. Other code stored it: call {self._feature}(optimizer) first, and "
                "then the code that stores its step, such as accelerator.prepare(optimizer)"
            )


_REPLACED: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Replacements]] = (
    weakref.WeakKeyDictionary()
)


def is_bypassed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a ``step`` that is called now is an original, and not its replacement."""
    return not all(each.is_called for each in _REPLACED.get(optimizer, ()))


# --- names of parameters --------------------------------------------------------------------------


class Names:
    """The names of parameters in the modules that a scaler watches."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []

    def watch(self, module: torch.nn.Module) -> None:
        """Add a module whose parameter names are used."""
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"module must be the torch.nn.Module that is trained, got {type(module).__name__}"
            )
        if module not in self.modules():
            self._modules.append(weakref.ref(module))

    def modules(self) -> list[torch.nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    def of(self, params: Iterable[Tensor], optimizer: torch.optim.Optimizer | None) -> list[str]:
        """Return the name of each parameter in a module, else in the optimizer, else its place."""
        known: dict[int, str] = {}
        for number, each in enumerate([] if optimizer is None else members(optimizer)):
            # Members of a container are identified by their class and index.
            where = "" if each is optimizer else f"{type(each).__name__}[{number}]."
            for group_index, group in enumerate(each.param_groups):
                given = dict(enumerate(group.get("param_names", ())))
                for index, param in enumerate(group["params"]):
                    place = f"{where}param_groups[{group_index}]['params'][{index}]"
                    known.setdefault(id(param), given.get(index, place))
        modules, qualified = self.modules(), dict[int, str]()
        for number, module in enumerate(modules):
            # Two modules may have parameters with equal names.
            prefix = f"{type(module).__name__}[{number}]." if len(modules) > 1 else ""
            for name, param in module.named_parameters():
                qualified.setdefault(id(param), prefix + without_wrappers(name))
        known |= qualified
        return [
            known.get(id(param), f"parameter {index} of shape {list(param.shape)}")
            for index, param in enumerate(params)
        ]


# --- the scale ------------------------------------------------------------------------------------


Closure = Callable[[], Any]


def split_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Closure | None, tuple[Any, ...], dict[str, Any]]:
    """Separate the closure from the other arguments of ``optimizer.step``.

    A closure passed by name also stays in ``kwargs``; otherwise it is the first argument, as in
    every PyTorch optimizer. accelerate passes None there, which is no closure.
    """
    if callable(kwargs.get("closure")):
        return kwargs["closure"], args, kwargs
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    return None, args, kwargs


def with_closure(
    closure: Closure, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of ``optimizer.step`` with a closure in place of the one split off."""
    if "closure" in kwargs:
        return args, kwargs | {"closure": closure}
    return (closure, *args), kwargs


def is_pytorchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step is PyTorch's, which evaluates a closure before anything else."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def evaluates_first(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step surely evaluates a closure once, before it changes anything."""
    # Among PyTorch's optimizers only LBFGS evaluates the closure after its first change.
    return is_pytorchs(optimizer) and type(optimizer).step.__module__ != "torch.optim.lbfgs"


def handles_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` divides by the scale and skips by itself.

    A wrapper that merely forwards attributes to a fused optimizer does not count: ``grad_scale``
    and ``found_inf``, set on the wrapper, would not reach the optimizer, and it would ignore both.
    Neither does a container, whose members would not get them.
    """
    own = getattr(optimizer, "__dict__", {}).get(HANDLES_SCALE, _NOT_SET)
    if own is _NOT_SET:
        of_class = getattr(type(optimizer), HANDLES_SCALE, False)
        return bool(of_class) and not hasattr(of_class, "__get__")
    if own:
        if any(_attribute(optimizer, holder) is not None for holder in HOLDERS):
            return False
        # torch.optim: loading the state of a non-fused optimizer into a fused one disables fusing.
        for group in getattr(optimizer, "param_groups", []):
            if not group.get("fused", True):
                return False
            params = group["params"]
            if params and not facts(params[0].device.type).fused_skips:
                return False
    return bool(own)


def writes_unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step surely leaves the gradients divided by ``grad_scale``."""
    is_pytorchs = type(optimizer).__module__.startswith("torch.optim.")
    return is_pytorchs and getattr(optimizer, "grad_scale", None) is None


def does_without_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether nothing sees that a fused step gets unscaled gradients, and no flag."""
    is_seen = hasattr(optimizer, "found_inf") or has_step_hooks(optimizer)
    return writes_unscaled(optimizer) and not is_seen


_NOT_SET = object()


def refuse_older_protocol(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if ``optimizer.step`` takes the scaler itself."""
    parameters: Iterable[str] = ()
    with suppress(ValueError):  # a method wrapped twice with functools.wraps, or a built-in
        parameters = inspect.signature(optimizer.step).parameters
    if "grad_scaler" in parameters:
        raise TypeError(
            f"step({name(optimizer)}): its step() takes the scaler (grad_scaler=...), the older "
            "protocol of torch.amp, which no optimizer of PyTorch uses any more. Cure: leave "
            f"{HANDLES_SCALE} out of the optimizer, and the scaler unscales and checks; or let "
            "step() divide by self.grad_scale and skip if self.found_inf is 1: both are set while "
            "it runs"
        )


def step_with_scale(
    optimizer: torch.optim.Optimizer,
    make_step: Callable[[], Any],
    scale: Tensor | None,
    found_inf: Tensor,
) -> Any:
    """Make a step with ``grad_scale`` and ``found_inf`` set during the call.

    The optimizer divides its gradients by ``grad_scale``, and steps unless ``found_inf``, a float32
    scalar, is 1. A ``grad_scale`` set by the user is multiplied by ``scale``. Sync: none.
    """
    grad_scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        grad_scale = scale if grad_scale is None else scale * grad_scale
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf  # type: ignore[attr-defined]
    fresh = _without_momentum(optimizer)
    try:
        result = make_step()
        if fresh:
            _clear_momentum(fresh, found_inf)
        return result
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


# The fused SGD of PyTorch 2.13 allocates momentum buffers uninitialized, and a skipped first step
# does not overwrite them: the next step would add garbage to the parameters.


def _without_momentum(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the states in which an SGD's first step will create a momentum buffer."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    return [
        optimizer.state[param]
        for group in optimizer.param_groups
        if group["momentum"]
        for param in group["params"]
        if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None
    ]


@torch.no_grad()
def _clear_momentum(states: list[dict[str, Any]], found_inf: torch.Tensor) -> None:
    """Zero the momentum buffers that a skipped step created. Sync: none."""
    for state in states:
        buffer = state.get("momentum_buffer")
        if buffer is not None:
            skipped = to_device(found_inf, buffer.device) > 0
            buffer.copy_(torch.where(skipped, torch.zeros_like(buffer), buffer))
