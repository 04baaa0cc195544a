"""Float16 and bfloat16: tensors have the dtype, ops compute in float32 and round what they return.

Autocast itself makes the tensors, and so PyTorch's own rules say what is in lower precision and
what is not. Only the arithmetic is another one than that of the machine: that of matrix units,
which add up in float32 and round once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep._autocast.casts import tensors_in
from halfstep._numerics.formats import Format
from halfstep._pytorch import modes
from halfstep._pytorch.dispatch import schema_of
from halfstep._simulate.arithmetic import Where, each_tensor
from halfstep._trace.ops import casts_to, op_name, written_to
from halfstep._trace.rows import dtype_name

# What they return is what they were given, in another order, or nothing that is computed.
_MOVE = {
    *("clone", "_to_copy", "copy_", "cat", "stack", "index", "index_select", "gather", "embedding"),
    *("where", "masked_fill", "masked_fill_", "constant_pad_nd", "repeat", "flip", "roll", "sort"),
    *("slice_backward", "select_backward", "masked_select", "max_pool2d_with_indices", "topk"),
    *("slice_scatter", "select_scatter", "tril", "triu", "fill_", "zero_", "lift_fresh"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones"),
    *("new_full", "new_empty_strided"),
}


class Halves:
    """Computes what is in lower precision in float32, and rounds each result once.

    Args:
        format: fp16 or bf16.
    """

    def __init__(self, format: Format) -> None:
        self._low = format.dtype
        self._name = dtype_name(format.dtype)
        self._dtypes = ResultDtypes()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: Where) -> Any:
        """Run an op; see :class:`halfstep._simulate.arithmetic.Arithmetic`."""
        if casts_to(func, args, kwargs) == self._name:
            where.note(args[1] if op_name(func) == "copy_" else args[0])
        elif self._computes_in_place(func, args, kwargs):
            return self._run_in_place(func, args, kwargs, where)
        elif self._computes(func, args, kwargs):
            dtypes = self._dtypes.of(func, args, kwargs)
            if self._low in dtypes:
                return self._run_wide(func, args, kwargs, dtypes, where)
        return func(*args, **kwargs)

    def _computes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = op_name(func)
        if func.is_view or schema_of(func).is_mutable or name in _MOVE or func.namespace != "aten":
            return False
        if not any(t.dtype is self._low for t in tensors_in((args, kwargs))):
            return False
        if "attention" in name:  # on CUDA the fused ones have no float32 form
            return "_for_cpu" in name or "efficient" in name
        if "batch_norm" in name:  # its running statistics, written to, must not be copies
            return args[3] is None or args[3].dtype is not self._low
        if name in ("_softmax", "_log_softmax"):  # asked for float32, which float32 cannot be
            return not args[2]
        return torch.Tag.nondeterministic_seeded not in func.tags  # it would draw other numbers

    def _computes_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Say whether an op writes the result of arithmetic to a tensor in lower precision."""
        name = op_name(func)
        if not schema_of(func).is_mutable or name in _MOVE or func.namespace != "aten":
            return False
        if not (torch.Tag.pointwise in func.tags or name in ("addmm_", "baddbmm_", "addmv_")):
            return False
        written = written_to(func, args, kwargs)
        is_first = len(written) == 1 and bool(args) and written[0] is args[0]
        return is_first and isinstance(args[0], Tensor) and args[0].dtype is self._low

    def _wide(self, values: Any) -> Any:
        return each_tensor(values, lambda t: t.float() if t.dtype is self._low else t)

    def _run_in_place(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: Where
    ) -> Any:
        wide = self._wide(args)
        func(*wide, **self._wide(kwargs))
        where.note(wide[0])
        args[0].copy_(wide[0])
        return args[0]

    def _run_wide(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtypes: tuple[torch.dtype, ...],
        where: Where,
    ) -> Any:
        asked = [torch.float32 if arg is self._low else arg for arg in args]
        named = {k: torch.float32 if arg is self._low else arg for k, arg in kwargs.items()}
        result = func(*self._wide(asked), **self._wide(named))
        left = iter(dtypes)

        def narrowed(tensor: Tensor) -> Tensor:
            if next(left) is not self._low:
                return tensor
            where.note(tensor)
            return tensor.to(self._low)

        return each_tensor(result, narrowed)


class ResultDtypes:
    """Which dtypes an op returns: that of each tensor, found out on tensors without values."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.dtype, ...]] = {}

    def of(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.dtype, ...]:
        """Return them in order; nothing for an op that cannot be asked."""
        key = (func, _kind(args), _kind(kwargs))
        if key not in self._known:
            self._known[key] = _found(func, args, kwargs)
        return self._known[key]


def _kind(value: Any) -> Any:
    """Return what the dtypes of results may depend on."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim() == 0
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((key, _kind(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, (bool, torch.dtype)) else type(value)


def _found(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.dtype, ...]:
    def empty(tensor: Tensor) -> Tensor:
        size, stride = tensor.size(), tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")

    named = {k: "meta" if isinstance(v, torch.device) else v for k, v in kwargs.items()}
    try:
        with modes.unseen_by_modes():
            result = func(*each_tensor(args, empty), **each_tensor(named, empty))
    except (NotImplementedError, RuntimeError):  # what it returns depends on values, say
        return ()
    return tuple(tensor.dtype for tensor in tensors_in((result,)))
