"""Islands: modules that keep one dtype, whatever autocast does around them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from halfstep import _torch
from halfstep.casting.context import Region, Settings
from halfstep.casting.names import did_you_mean

# What torch.compile, DistributedDataParallel and FSDP put into the names of modules.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


class Island(NamedTuple):
    """How a module is kept.

    Attributes:
        dtype: What its floating-point inputs are cast to.
        cast_back: Whether its outputs of that dtype are cast to the dtype that came in.
    """

    dtype: torch.dtype
    cast_back: bool


def keep(
    model: nn.Module,
    *patterns: str,
    dtype: torch.dtype = torch.float32,
    cast_back: bool = False,
) -> Kept:
    """Run modules in one dtype, also under autocast: for good, or as long as a block.

    Their floating-point inputs are cast to ``dtype`` and autocast is off inside, for all of their
    submodules too. Parameters, ``state_dict`` and the kind of the modules stay as they are. Works
    inside ``torch.compile`` and activation checkpointing, in copies of the model and in threads.

    Args:
        model: The model; the patterns go by its names.
        *patterns: Globs over the names of ``model.named_modules()``: ``"head"``, ``"*.norm"``; a
            ``*`` stands for dots too.
        dtype: A floating dtype, that of the modules' parameters.
        cast_back: Cast outputs of ``dtype`` to that of the first floating-point input.

    Returns:
        What undoes it: ``keep(...).remove()``, or ``with keep(...):``.

    Raises:
        TypeError: ``model`` is no module, or ``dtype`` no floating dtype.
        ValueError: A pattern matches no module (the message names those like it), or the parameters
            of a module have another dtype.

    Sync: none.

    Example:
        >>> import halfstep
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> with halfstep.autocast("cpu", torch.bfloat16), keep(model, "1"):
        ...     model(torch.ones(1, 4)).dtype
        torch.float32
        >>> with halfstep.autocast("cpu", torch.bfloat16):
        ...     model(torch.ones(1, 4)).dtype
        torch.bfloat16
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"keep({type(model).__name__}): pass the model and patterns of its names")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"keep(dtype={dtype!r}): pass a floating dtype, such as torch.float32")
    modules = dict(_matching(model, patterns))
    for name, module in modules.items():
        _require_parameters(name, module, dtype)
    return Kept(list(modules.values()), Island(dtype, cast_back))


class Kept:
    """Modules that are kept in one dtype until :meth:`remove`, or until the block is left."""

    def __init__(self, modules: list[nn.Module], island: Island) -> None:
        self._modules = modules
        self._island = island
        for module in modules:
            if not isinstance(module, _KeptModule):
                cls: Any = type(module)
                module.__class__ = _kept_class(cls)
            # A list of its own: a shallow copy of a module shares its values.
            module._islands = [*getattr(module, "_islands", []), island]  # type: ignore[assignment]

    def remove(self) -> None:
        """Let the modules run as autocast says again."""
        for module in self._modules:
            islands = [each for each in module._islands if each is not self._island]  # type: ignore[union-attr]
            module._islands = islands  # type: ignore[assignment]
            base: Any = type(module).__mro__[2]
            if not islands and type(module) is _kept_class(base):  # and nobody changed it since
                module.__class__ = base
        self._modules = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{len(self._modules)} modules kept in {self._island.dtype}>"


class _KeptModule:
    """What the class of a kept module has before its own: the last island holds."""

    _islands: list[Island]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward`` on its island."""
        if not self._islands:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        dtype, cast_back = self._islands[-1]
        given = next(_floats((args, kwargs)), None)
        args, kwargs = _cast((args, kwargs), dtype, None)
        device = None if given is None else given.device.type
        if device is None or not torch.is_autocast_enabled(device):
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        else:
            with Region(_off(device)):
                result = super().forward(*args, **kwargs)  # type: ignore[misc]
        if cast_back and given is not None and given.dtype is not dtype:
            result = _cast(result, given.dtype, dtype)
        return result


@cache
def _kept_class(cls: Any) -> Any:
    # Of the same name, for repr(model) and messages. Not the object's own `forward`: a replica or
    # a copy of the module would run the forward of the original.
    kept = type(cls.__name__, (_KeptModule, cls), {"__module__": cls.__module__})
    kept.__qualname__ = cls.__qualname__
    return kept


def _off(device: str) -> Settings:
    switches = _torch.autocast_switches(device)._replace(enabled=False)
    return Settings(switches, policy=None, inherit=False)


def _floats(value: Any) -> Iterator[Tensor]:
    """Yield all floating-point tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _floats(item)
    elif isinstance(value, Mapping):
        yield from _floats(list(value.values()))


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


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    if not patterns:
        raise ValueError("keep(model): say which modules to keep, such as keep(model, '*.norm')")
    names = {without_wrappers(name): m for name, m in model.named_modules() if name}
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            near = did_you_mean(pattern, names) or f"; its modules are {', '.join(list(names)[:8])}"
            raise ValueError(
                f"keep(): no module of this {type(model).__name__} is named like {pattern!r}{near}"
            )
        for name in found:
            yield name, names[name]


def without_wrappers(name: str) -> str:
    """Return the name that a module has before it, or one around it, is wrapped."""
    return _WRAPPERS.sub("", name).lstrip(".")


def _require_parameters(name: str, module: nn.Module, dtype: torch.dtype) -> None:
    for param_name, param in module.named_parameters():
        if param.is_floating_point() and param.dtype is not dtype:
            raise ValueError(
                f"keep({name!r}, dtype={dtype}): its parameter {param_name} is {param.dtype}. "
                f"Convert the module first: model.get_submodule({name!r}).to({dtype})"
            )
