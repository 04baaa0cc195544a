"""Modules that run under other rules than what is around them.

Such a module gets a class of the same name, derived from its own, whose ``forward`` looks up how to
run. (Not a ``forward`` of the object itself: a replica or a copy would run that of the original.
Not hooks: these are called once the module's own have been, and stop ``torch.compile``.)
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from halfstep._autocast.casts import tensors_in
from halfstep._autocast.gathered import has_ranks
from halfstep._autocast.region import ModuleRegion, Settings, settings_within
from halfstep._pytorch import amp, distributed


class Island(NamedTuple):
    """How a module is kept.

    Attributes:
        dtype: What its floating-point inputs are cast to.
        cast_back: Whether its outputs of that dtype are cast to the dtype that came in.
    """

    dtype: torch.dtype
    cast_back: bool


class Wrapped:
    """What the class of a wrapped module has before its own.

    Attributes:
        islands: What keep() made of it; the last one holds.
        path: Its name in the model, if a policy has rules for it.
    """

    _islands: tuple[Island, ...]
    _path: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward`` as it is to run here."""
        run = super().forward  # type: ignore[misc]
        if self._islands:
            return _run_on_island(self, self._islands[-1], run, args, kwargs)
        given = next(tensors_in((args, kwargs)), None) if self._path else None
        if given is None or not torch.is_autocast_enabled(given.device.type):
            return run(*args, **kwargs)
        settings = settings_within(self._path, given.device.type)
        if settings is None:
            return run(*args, **kwargs)
        if not settings.switches.enabled:
            island = Island(torch.float32, cast_back=False)
            return _run_on_island(self, island, run, args, kwargs)
        with ModuleRegion(settings):
            return run(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its class cannot be found by name: what is saved makes it anew.
        reduced: Any = super().__reduce_ex__(protocol)
        _, args, *rest = reduced
        return _new, (type(self).__mro__[2], *args[1:]), *rest


def wrap(module: nn.Module) -> Any:
    """Let ``module`` look up how to run, from now on.

    Raises:
        ValueError: It is a lazy module, which will change its class itself.
    """
    if isinstance(module, LazyModuleMixin):
        raise ValueError(
            f"{type(module).__name__} becomes another module with its first batch: run the model "
            "on one before its modules are kept or have rules"
        )
    cls: Any = type(module)
    if not isinstance(module, Wrapped):
        module.__class__ = _wrapped(cls)
        module._islands, module._path = (), ""  # type: ignore[assignment]
    return module


def unwrap(module: Any) -> None:
    """Give ``module`` its class back, if nothing is to be looked up."""
    base = type(module).__mro__[2]
    if not module._islands and not module._path and type(module) is _wrapped(base):
        module.__class__ = base


def require_parameters(name: str, module: nn.Module, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` if a module cannot be an island in ``dtype``."""
    for param_name, param in module.named_parameters():
        if param.is_floating_point() and param.dtype is not dtype:
            raise ValueError(
                f"{name!r} cannot be an island in {dtype}: its parameter {param_name} is "
                f"{param.dtype}. Convert it first: model.get_submodule({name!r}).to({dtype})"
            )


@cache
def _wrapped(cls: Any) -> Any:
    # Of the same name, for repr(model) and messages.
    wrapped = type(cls.__name__, (Wrapped, cls), {"__module__": cls.__module__})
    wrapped.__qualname__ = cls.__qualname__
    return wrapped


def _new(cls: Any, *args: Any) -> Any:
    wrapped = _wrapped(cls)
    return wrapped.__new__(wrapped, *args)


def _run_on_island(module: Any, island: Island, run: Any, args: Any, kwargs: Any) -> Any:
    dtype, cast_back = island
    if not torch.compiler.is_compiling() and has_ranks():
        _require_gathered(module, dtype)
    given = next((each for each in tensors_in((args, kwargs)) if each.is_floating_point()), None)
    args, kwargs = _cast((args, kwargs), dtype, None)
    device = None if given is None else given.device.type
    if device is None or not torch.is_autocast_enabled(device):
        result = run(*args, **kwargs)
    else:
        with ModuleRegion(_off(device)):
            result = run(*args, **kwargs)
    if cast_back and given is not None and given.dtype is not dtype:
        result = _cast(result, given.dtype, dtype)
    return result


def _require_gathered(island: nn.Module, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` if fully_shard gathers parameters of an island in another dtype."""
    for name, module in island.named_modules():
        # The parameters of a module that is sharded by itself are not gathered yet.
        gathered = distributed.gathered_dtype(module)
        dtypes = {param.dtype for param in module.parameters(recurse=False)} | {gathered}
        wrong = [each for each in dtypes if each not in (None, dtype) and each.is_floating_point]
        if wrong:
            inner = f" (in {name})" if name else ""
            policy = f"MixedPrecisionPolicy(param_dtype={dtype})"
            raise ValueError(
                f"{type(island).__name__}{inner} is an island in {dtype}, but runs with parameters "
                f"in {wrong[0]}, as fully_shard gathers them. Shard the island by itself, before "
                f"the modules around it: fully_shard(island, mp_policy={policy})"
            )


def _off(device: str) -> Settings:
    switches = amp.autocast_switches(device)._replace(enabled=False)
    return Settings(switches, policy=None, inherit=False)


def _cast(value: Any, dtype: torch.dtype, only: torch.dtype | None) -> Any:
    """Cast floating-point tensors in nested containers; ``only`` those of one dtype, if given."""
    if isinstance(value, Tensor):
        is_meant = value.is_floating_point() and only in (None, value.dtype)
        return value.to(dtype) if is_meant else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype, only) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype, only) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _cast(item, dtype, only)) for key, item in value.items())
    return value
