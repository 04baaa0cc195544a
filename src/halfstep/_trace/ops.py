"""What an op that a dispatch mode is called for does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep._pytorch.dispatch import schema_of
from halfstep._trace.rows import Value, dtype_name

# What they return is not computed.
_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

# They write to buffers of batch norm, and their schemas (PyTorch 2.13) do not say so.
_BUFFERS = ("running_mean", "running_var")
_WRITE_UNSAID = dict.fromkeys(
    (
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    ),
    _BUFFERS,
)


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


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an op writes to."""
    hidden = _WRITE_UNSAID.get(op_name(func), ())
    if not (hidden or schema_of(func).is_mutable):
        return []
    arguments = schema_of(func).arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in (*written, *hidden) if name in given]


def makes_no_values(func: Any) -> bool:
    """Say whether an op only allocates, or returns another view of what it got."""
    return func.is_view or op_name(func) in _ALLOCATE


def computes_nothing(func: Any, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> bool:
    """Say whether an op only allocates, returns another view of what it got, or has no tensors."""
    if makes_no_values(func) or not (inputs or outputs):
        return True
    memories = {value.storage for value in inputs}
    return (
        bool(outputs)
        and not schema_of(func).is_mutable
        and all(value.storage in memories for value in outputs)
    )
