"""Optimizers as a scaler sees them: their members, names of parameters, who handles the scale."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_HANDLES_SCALE = "_step_supports_amp_scaling"

HOLDERS = ("optimizers", "chained_optimizers")
"""The attributes in which a container keeps its optimizers."""


def name(optimizer: object) -> str:
    """Return what an error message calls the optimizer: its class."""
    return type(optimizer).__name__


def is_optimizer(value: object) -> bool:
    """Return whether something has groups of parameters, or holds optimizers."""
    return hasattr(value, "param_groups") or any(
        isinstance(_attribute(value, holder), Iterable) for holder in HOLDERS
    )


def require_optimizer(call: str, optimizer: object) -> None:
    """Raise TypeError if a call was given something else than an optimizer."""
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
    """Return an optimizer and all that it holds, each once; those without groups are left out."""
    return [each for each in _reached(optimizer) if hasattr(each, "param_groups")]


def makes_step_of(stepped: Any, optimizer: Any) -> bool:
    """Return whether a step of the first is one of the second: itself, wrapped or held by it."""
    groups = getattr(optimizer, "param_groups", None)
    return stepped is optimizer or any(
        each is optimizer or each.param_groups is groups for each in members(stepped)
    )


def _reached(optimizer: Any) -> list[Any]:
    """Return an optimizer and all that it holds at any depth, each once."""
    reached = [optimizer]
    seen = {id(optimizer)}
    for each in reached:  # it grows
        for holder in HOLDERS:
            for held in _steppable(_attribute(each, holder)):
                if id(held) not in seen:
                    seen.add(id(held))
                    reached.append(held)
    return reached


def _attribute(optimizer: Any, holder: str) -> Any:
    """Return what a holder of an optimizer's own has; None without one, or if reading it fails."""
    of_class = getattr(type(optimizer), holder, None)
    # A list in a class is a registry of all its optimizers, and no part of any of them.
    if of_class is not None and not hasattr(of_class, "__get__"):
        return getattr(optimizer, "__dict__", {}).get(holder)
    try:
        return getattr(optimizer, holder, None)
    except Exception:
        return None


def _steppable(value: object) -> Iterator[Any]:
    """Yield what has a ``step``, in lists and dictionaries at any depth."""
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | torch.Tensor):
        for each in value:
            if hasattr(each, "step"):
                yield each
            else:
                yield from _steppable(each)


# --- names of parameters --------------------------------------------------------------------------


class Names:
    """Names of parameters, from the modules that a scaler watches.

    The modules are held weakly and asked when a name is wanted: parameters may be replaced.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []

    def watch(self, module: torch.nn.Module) -> None:
        """Take names from this module too."""
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"watch({type(module).__name__}): pass the torch.nn.Module whose parameters are "
                "trained"
            )
        if module not in self.modules():
            self._modules.append(weakref.ref(module))

    def modules(self) -> list[torch.nn.Module]:
        """Return the watched modules that still exist."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def of(self, params: Iterable[Tensor], optimizer: torch.optim.Optimizer | None) -> list[str]:
        """Return a name for each parameter.

        The qualified name in a watched module, else the one that the optimizer was given
        (``named_parameters()`` instead of ``parameters()``), else the place in its groups.
        """
        known = _places(optimizer) | self._qualified(optimizer)
        return [
            known.get(id(param), f"parameter {index} of shape {list(param.shape)}")
            for index, param in enumerate(params)
        ]

    def layers_of(
        self, params: Iterable[Tensor], optimizer: torch.optim.Optimizer | None
    ) -> list[str]:
        """Return for each parameter the name of its module: ``blocks.0.fc`` for its weight."""
        known = self._qualified(optimizer)
        params = list(params)
        unknown = [index for index, param in enumerate(params) if id(param) not in known]
        if unknown:
            raise ValueError(
                f"per='layer' needs the names of the parameters, and {len(unknown)} of "
                f"{len(params)} have none (the first is number {unknown[0]}, of shape "
                f"{list(params[unknown[0]].shape)}): call scaler.watch(model), or make the "
                "optimizer with model.named_parameters()"
            )
        return [known[id(param)].rpartition(".")[0] for param in params]

    def _qualified(self, optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
        known: dict[int, str] = {}
        for each in [] if optimizer is None else members(optimizer):
            for group in each.param_groups:
                names = group.get("param_names", [])
                known.update(zip(map(id, group["params"]), names, strict=False))
        modules, qualified = self.modules(), dict[int, str]()
        for number, module in enumerate(modules):
            # Two modules may have parameters of the same name.
            prefix = f"{type(module).__name__}[{number}]." if len(modules) > 1 else ""
            for name, param in module.named_parameters():
                # Without what torch.compile's wrapper adds.
                qualified.setdefault(id(param), prefix + name.replace("_orig_mod.", ""))
        return known | qualified


def _places(optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    found: dict[int, str] = {}
    for number, each in enumerate([] if optimizer is None else members(optimizer)):
        # Those of a container without groups of its own are told apart by their class.
        where = "" if each is optimizer else f"{type(each).__name__}[{number}]."
        for group_index, group in enumerate(each.param_groups):
            for index, param in enumerate(group["params"]):
                place = f"{where}param_groups[{group_index}]['params'][{index}]"
                found.setdefault(id(param), place)
    return found


# --- the scale ------------------------------------------------------------------------------------


def evaluates_first(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step surely calls a closure once, before it changes anything."""
    # Of PyTorch's own optimizers LBFGS alone evaluates the closure after its first change.
    module = type(optimizer).step.__module__
    return module.startswith("torch.optim.") and module != "torch.optim.lbfgs"


def handles_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` divides by the scale and skips by itself.

    A wrapper that only passes attributes on to a fused optimizer does not count: ``grad_scale`` and
    ``found_inf``, set on the wrapper, would not reach the optimizer, and it would step with both
    forgotten. Neither does a container, whose own optimizers would be.
    """
    own = vars(optimizer).get(_HANDLES_SCALE, _NOT_SET)
    if own is _NOT_SET:
        return getattr(type(optimizer), _HANDLES_SCALE, False) is True
    if own is True:
        if any(_attribute(optimizer, holder) is not None for holder in HOLDERS):
            return False
        # torch.optim: the state of one that is not fused, loaded into a fused one, switches it off.
        for group in optimizer.param_groups:
            if not group.get("fused", True):
                return False
    return own is True


def writes_unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step surely leaves the gradients divided by ``grad_scale``."""
    is_pytorchs = type(optimizer).__module__.startswith("torch.optim.")
    return is_pytorchs and getattr(optimizer, "grad_scale", None) is None


_NOT_SET = object()

_takes_scaler: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""By the function behind ``step``: its signature is not read in every step."""


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` wants the scaler itself, the older protocol."""
    step = optimizer.step
    function = getattr(step, "__func__", step)
    is_function = type(function) is FunctionType  # what else is callable may not be hashable
    found = _takes_scaler.get(function) if is_function else None
    if found is None:
        found = "grad_scaler" in inspect.signature(step).parameters
        if is_function:
            _takes_scaler[function] = found
    return found


def step_with_scale(
    optimizer: torch.optim.Optimizer,
    make_step: Callable[[], Any],
    scale: Tensor | None,
    found_inf: Tensor,
) -> Any:
    """Make a step with ``grad_scale`` and ``found_inf`` set for the time of the call.

    It divides its gradients by ``grad_scale`` and steps unless ``found_inf``, a float32 scalar, is
    1. A ``grad_scale`` that the user has set is multiplied with ``scale``. Sync: none.
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


# The fused SGD of PyTorch 2.13 makes its momentum buffers from memory as it finds it, which a first
# step that is skipped does not overwrite: the next one would add what was there to the parameters.


def _without_momentum(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the states in which the first step of an SGD will make a momentum buffer."""
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
    """Zero what a skipped step has made. Sync: none."""
    for state in states:
        buffer = state.get("momentum_buffer")
        if buffer is not None:
            skipped = found_inf.to(buffer.device, non_blocking=True) > 0
            buffer.copy_(torch.where(skipped, torch.zeros_like(buffer), buffer))
