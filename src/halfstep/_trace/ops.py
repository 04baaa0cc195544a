"""Ops seen by a dispatch mode: what an op does, and the mode that calls a method for each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep._autocast import scopes
from halfstep._common.nested import tensors_in
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch import amp, compiler, dispatch, modes
from halfstep._pytorch.compiler import eager
from halfstep._pytorch.dispatch import schema_of
from halfstep._trace.places import OpPlaces, RunningModules
from halfstep._trace.rows import Value

# Their results are not computed.
_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

# They write to buffers of batch norm; their schemas (PyTorch 2.13) do not say so.
_WRITE_BUFFERS = {
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
}


@cache
def op_name(func: Any) -> str:
    """Return the name of an op, without its overload."""
    return schema_of(func).name.removeprefix("aten::")


def device_of(given: list[Tensor], kwargs: dict[str, Any]) -> str:
    """Return the device type that an op runs on."""
    if given:
        return given[0].device.type
    return torch.device(kwargs.get("device") or torch.get_default_device()).type


def casts_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the dtype if an op casts from a floating dtype to another, else None."""
    if func is torch.ops.aten._to_copy.default:
        source, to = args[0].dtype, kwargs.get("dtype") or args[0].dtype
    elif func is torch.ops.aten.copy_.default:
        source, to = args[1].dtype, args[0].dtype
    else:
        return None
    is_cast = to is not source and to.is_floating_point and source.is_floating_point
    return dtype_name(to) if is_cast else None


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an op by their names in its schema."""
    names = (argument.name for argument in schema_of(func).arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an op writes to."""
    names = _names_written(func)
    given = by_name(func, args, kwargs) if names else {}
    return [given[name] for name in names if name in given]


@cache
def _names_written(func: Any) -> tuple[str, ...]:
    schema, writes_buffers = schema_of(func), op_name(func) in _WRITE_BUFFERS
    if not (writes_buffers or schema.is_mutable):
        return ()
    infos = ((argument.name, argument.alias_info) for argument in schema.arguments)
    written = [name for name, info in infos if info is not None and info.is_write]
    return (*written, *(("running_mean", "running_var") if writes_buffers else ()))


@cache
def makes_no_values(func: Any) -> bool:
    """Return whether an op only allocates, or returns another view of its input."""
    return func.is_view or op_name(func) in _ALLOCATE


def computes_nothing(func: Any, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> bool:
    """Return whether an op only allocates, returns a view of its input, or has no tensors."""
    if makes_no_values(func) or not (inputs or outputs):
        return True
    memories = {value.storage for value in inputs}
    return (
        bool(outputs)
        and not schema_of(func).is_mutable
        and all(value.storage in memories for value in outputs)
    )


def is_dense(tensor: Tensor) -> bool:
    """Return whether the kernels for the device of a tensor are those that run on it."""
    return tensor.layout is torch.strided and not tensor.is_nested


class _Thread(threading.local):
    """Whether a kernel of autocast has cast the arguments of the composite that is decomposed."""

    is_cast = False


class OpMode(modes.DispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that calls :meth:`run` for every op that computes, and not for composites."""

    def __init__(self, modules: RunningModules) -> None:
        super().__init__()
        self.modules, self.places = modules, OpPlaces(modules)
        self._decomposing = _Thread()

    @contextmanager
    def active(self, *, has_global_hooks: bool = True) -> Iterator[None]:
        """See the ops of this thread, and of its backward passes, while the block runs.

        Compiled code runs by :func:`eager`.
        """
        with eager(has_global_hooks=has_global_hooks), self.modules.followed(), self:
            yield

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an op and return its result; ``given`` are the tensors among its arguments."""
        raise NotImplementedError

    @compiler.keep_out_of_graphs
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if dispatch.is_higher_order(func):
            kernel = dispatch.kernel_in_mode(func)
            with self if kernel is not None else nullcontext():
                return (kernel or func)(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        device = device_of(given, kwargs)
        if dispatch.is_made_of_others(func, device) and all(map(is_dense, given)):
            return self._decompose(func, device, args, kwargs)
        return self.run(func, args, kwargs, given)

    def _decompose(
        self, func: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a composite as its parts: in inference mode no level above this mode decomposes it.

        Autocast is off in a mode. It is switched on for the parts, unless one of its kernels has
        cast the arguments of the whole.
        """
        here, before = self._decomposing, self._decomposing.is_cast
        here.is_cast = before or self._is_cast_by_autocast(func, device)
        is_on = not here.is_cast and autocast_of_caller(device)[0] is not None
        try:
            with modes.autocast_again(device) if is_on else nullcontext(), self:
                return dispatch.decompose(func, args, kwargs)
        finally:
            here.is_cast = before

    def _is_cast_by_autocast(self, func: Any, device: str) -> bool:
        if device in scopes.policies():
            ruled = self.places.ruled
            return bool(ruled) and ruled[-1].rule.action != "leave"
        if device not in amp.autocast_devices():
            return False
        name = f"{op_name(func)}.{dispatch.overload_of(func)}"
        return name in dispatch.overloads_with_autocast_kernel(device)


def autocast_of_caller(device: str) -> tuple[str | None, bool]:
    """Return the lower precision outside of the mode, None for autocast off, and if it caches."""
    if device not in amp.autocast_devices():
        return None, False
    switches = modes.autocast_switches_of_caller(device)
    return (dtype_name(switches.dtype) if switches.enabled else None), switches.cache
