"""torch.nn and torch.utils.data: contents and calls of modules, and loaders of batches."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.utils.parametrize
import torch.utils.data.dataloader
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from halfstep._pytorch import modes
from halfstep._pytorch.imports import AroundImports, Execute


def registers_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dicts of a module's own parameters, buffers and submodules."""
    held = vars(module)
    return held["_parameters"], held["_buffers"], held["_modules"]


def plain_parameters_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a module has as attributes in place of parameters.

    A replica of nn.DataParallel has copies; the deprecated ``weight_norm`` and ``spectral_norm``
    compute one in a hook.
    """
    held = vars(module)
    if held.get("_is_replica", False):
        return [value for value in held.values() if isinstance(value, torch.Tensor)]
    made = [held.get(getattr(hook, "name", "")) for hook in held["_forward_pre_hooks"].values()]
    return [value for value in made if isinstance(value, torch.Tensor)]


def is_parametrization(module: torch.nn.Module) -> bool:
    """Return whether a module computes a parameter of another one from others."""
    return isinstance(module, torch.nn.utils.parametrize.ParametrizationList)


# The code object in which a module is called; its locals `args` and `kwargs` are the inputs.
CALL_CODE = torch.nn.Module._call_impl.__code__

# The class whose ``__next__`` returns the batches of every DataLoader.
LOADER_ITERATOR: Any = torch.utils.data.dataloader._BaseDataLoaderIter
NEXT_INDICES = "_next_index"  # its method that returns those of the examples of a later batch


def makers_of_batches(iterator: Any) -> tuple[Any, list[Any]]:
    """Return the data set of an iterator of a DataLoader, and what may make batches, last first."""
    dataset, names = iterator._dataset, ("__getitem__", "__getitems__", "__iter__")
    return dataset, [iterator._collate_fn, *(getattr(type(dataset), n, None) for n in names)]


# (module, name): what registers a hook on the backward passes of all modules.
GLOBAL_BACKWARD_HOOKS = tuple(
    (torch.nn.modules.module, f"register_module_{name}")
    for name in ("full_backward_hook", "full_backward_pre_hook", "backward_hook")
)


# --- hooks on all modules -------------------------------------------------------------------------

_WARNING = ("ignore", re.compile(".*when there are global hooks"), Warning, None, 0)
_EXPORT = "torch.export._trace"


class GlobalHooks:
    """Functions that are called before and after every ``forward``, except in ``torch.export``.

    They are global, not hooks on each module: nn.TransformerEncoderLayer takes another code path if
    it has hooks. While there are any, ``torch.export.export(strict=True)`` would fail.
    """

    def __init__(self, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        self._enter, self._leave = enter, leave
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Install the hooks, and hide the warning of compiled modules about them."""
        # warnings.filterwarnings() would make every earlier warning of the script appear again.
        warnings.filters.insert(0, _WARNING)  # type: ignore[attr-defined]
        _installed.append(self)
        self._register()
        _watch_export()

    def remove(self) -> None:
        """Remove the hooks, if they are installed."""
        if self not in _installed:
            return
        _installed.remove(self)
        self._unregister()
        if _WARNING in warnings.filters:
            warnings.filters.remove(_WARNING)  # type: ignore[attr-defined]
        if not _installed:
            _unwatch_export()

    def _register(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def _unregister(self) -> None:
        while self._handles:
            self._handles.pop().remove()


_installed: list[GlobalHooks] = []


def _load_export(module: ModuleType, execute: Execute) -> None:
    execute(module)
    if _installed:
        _watch_export()


_importer = AroundImports((_EXPORT,), _load_export)
_export: Callable[..., Any] | None = None


def _watch_export() -> None:
    """Let torch.export run without the hooks, until :func:`_unwatch_export`."""
    global _export
    module: Any = sys.modules.get(_EXPORT)
    if module is None and _importer not in sys.meta_path:
        sys.meta_path.insert(0, _importer)
    elif module is not None and _export is None:
        _export = module._export
        module._export = functools.partial(_without_hooks, _export)


def _unwatch_export() -> None:
    global _export
    if _importer in sys.meta_path:
        sys.meta_path.remove(_importer)
    if _export is not None:
        module: Any = sys.modules[_EXPORT]
        module._export, _export = _export, None


def _without_hooks(export: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    for each in _installed:
        each._unregister()
    try:
        with modes.without_ours():
            return export(*args, **kwargs)
    finally:
        for each in _installed:
            each._register()


def can_be_called_again(module: torch.nn.Module) -> bool:
    """Return whether a module is one of PyTorch whose call changes its buffers at most."""
    parts = [*module.modules()]
    return all(type(part).__module__.startswith("torch.nn.modules.") for part in parts) and not any(
        map(has_forward_hooks, parts)
    )


def has_forward_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
