"""Arithmetic in simulated formats, and counts of the values lost by rounding."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfstep._common.nested import map_tensors, tensors_in
from halfstep._common.numbers import things
from halfstep._common.text import aligned
from halfstep._numerics.formats import Format, dtype_name, rounded
from halfstep._pytorch import modes, storages
from halfstep._pytorch.dispatch import schema_of
from halfstep._pytorch.parts import parts_of
from halfstep._tools.trace.ops import casts_to, op_name, written_to
from halfstep._tools.trace.rows import Phase


@dataclass(frozen=True)
class RoundingCount:
    """Counts of the values that were rounded in a module.

    Attributes:
        module: Its path; empty for the model itself and for ops outside of it.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        values: Number of rounded values.
        saturated: Number of finite values that overflowed: they became inf or the largest value.
        flushed: Number of nonzero values that became zero.
        amax: The largest finite magnitude before rounding.
    """

    module: str
    phase: Phase
    values: int
    saturated: int
    flushed: int
    amax: float

    @property
    def share(self) -> float:
        """The fraction of values that were saturated or flushed, 0 to 1."""
        return (self.saturated + self.flushed) / self.values if self.values else 0.0

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


class _Sum(NamedTuple):
    """Sums on a device, read only at the end."""

    values: int
    saturated: Tensor
    flushed: Tensor
    amax: Tensor

    def joined(self, other: _Sum) -> _Sum:
        # Not in place: a tensor made in inference mode must not be changed outside of it.
        return _Sum(
            self.values + other.values,
            self.saturated + other.saturated,
            self.flushed + other.flushed,
            torch.maximum(self.amax, other.amax),
        )


class RoundingCounts:
    """Running counts of values that are rounded to a format; several threads may add to them."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._sums: dict[tuple[str, Phase, torch.device], _Sum] = {}
        self._lock = threading.Lock()

    def add(self, module: str, phase: Phase, values: Tensor) -> None:
        """Count values before they are rounded. Sync: none.

        Tensors without values, as in an exported program, are skipped.
        """
        with modes.unseen_by_modes():
            # A nested or sparse tensor also has indices.
            parts = [p for p in parts_of(values) or () if p.is_floating_point() and p.numel()]
            for counted in [_counted(part, self._format) for part in parts]:
                with self._lock:
                    key = (module, phase, values.device)
                    before = self._sums.get(key)
                    self._sums[key] = counted if before is None else before.joined(counted)

    def rows(self) -> list[RoundingCount]:
        """Return the counts by module and phase. Sync: waits for the devices."""
        with self._lock:
            sums = dict(self._sums)
        rows: dict[tuple[str, Phase], RoundingCount] = {}
        for (module, phase, _), found in sums.items():
            before = rows.get((module, phase), RoundingCount(module, phase, 0, 0, 0, 0.0))
            rows[module, phase] = RoundingCount(
                module,
                phase,
                before.values + found.values,
                before.saturated + int(found.saturated),
                before.flushed + int(found.flushed),
                max(before.amax, float(found.amax)),
            )
        return list(rows.values())


def _counted(values: Tensor, format: Format) -> _Sum:
    sizes = values.detach().abs()
    finite = torch.where(sizes < math.inf, sizes, 0.0)  # also replaces NaN
    return _Sum(
        values.numel(),
        (finite > format.last_held).sum(),
        ((sizes > 0) & (sizes <= format.flushed_below)).sum(),
        finite.amax().float(),
    )


_OUTSIDE = "(in no submodule)"
_HEAD = ("module", "phase", "values", "saturated", "flushed", "share", "amax")


def counts_text(
    rows: Sequence[RoundingCount], format: Format, *, clips: bool, notes: Sequence[str]
) -> str:
    """Return the counts as a table between two lines of summary and the notes."""
    body = aligned([_HEAD, *map(_cells, rows)], right=_HEAD[2:]) if rows else []
    summary, worst = summary_text(rows, format), worst_text(rows, format, clips=clips)
    return "\n".join([summary, worst, *body, *notes])


def summary_text(rows: Sequence[RoundingCount], format: Format) -> str:
    """Return ``"fp16: 81,920 values rounded, 12 saturated, 3,004 flushed to zero"``."""
    values, saturated = sum(row.values for row in rows), sum(row.saturated for row in rows)
    lost = f"{saturated:,} saturated, {sum(row.flushed for row in rows):,} flushed to zero"
    return f"{format.name}: {things(values, 'value')} rounded, {lost}"


def worst_text(rows: Sequence[RoundingCount], format: Format, *, clips: bool) -> str:
    """Return a line about the first row, which is the worst."""
    if not rows:
        return "nothing was rounded: no product that the policy lowers ran in the block"
    row = rows[0]
    if not row.saturated + row.flushed:
        return f"worst: none; every value is in the range of {format.name}"
    parts = []
    if row.saturated:
        became = f"clipped to {format.largest:,g}" if clips else "became inf"
        parts.append(f"{_percent(row.saturated, row.values)} of its values {became}")
    if row.flushed:
        of = "" if parts else " of its values"
        parts.append(f"{_percent(row.flushed, row.values)}{of} became zero")
    ends = f"{format.name} ends at {format.largest:,g} and {format.smallest_subnormal:.3g}"
    place, lost = f"{row.module or _OUTSIDE}, {row.phase}", " and ".join(parts)
    return f"worst: {place}: {lost}; largest {row.amax:.3g}, {ends}"


def _cells(row: RoundingCount) -> tuple[str, ...]:
    return (
        row.module or _OUTSIDE,
        row.phase,
        f"{row.values:,}",
        f"{row.saturated:,}",
        f"{row.flushed:,}",
        _percent(row.saturated + row.flushed, row.values),
        f"{row.amax:.3g}",
    )


def _percent(count: int, of: int) -> str:
    share = 100 * count / of
    return f"{share:.3g} %" if share < 99.95 or count == of else f"{share:.5g} %"


# --- arithmetic -----------------------------------------------------------------------------------

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class OpContext:
    """Module, phase and rule of an op, and the counts of its values."""

    module: str
    phase: Phase
    is_lowered: bool  # part of an op that the policy lowers, or of its gradient
    counts: RoundingCounts

    def note(self, values: Tensor) -> None:
        """Count values just before they are rounded. Sync: none."""
        self.counts.add(self.module, self.phase, values)


# Ops that only move values or allocate memory.
_MOVE = {
    *("clone", "_to_copy", "copy_", "cat", "stack", "index", "index_select", "gather", "embedding"),
    *("where", "masked_fill", "masked_fill_", "constant_pad_nd", "repeat", "flip", "roll", "sort"),
    *("slice_backward", "select_backward", "masked_select", "max_pool2d_with_indices", "topk"),
    *("slice_scatter", "select_scatter", "tril", "triu", "fill_", "zero_", "lift_fresh"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones"),
    *("new_full", "new_empty_strided"),
}


class HalfArithmetic:
    """Arithmetic in float16 and bfloat16: ops compute in float32 and round each result once.

    Autocast itself creates the tensors, so PyTorch's own rules determine which are in lower
    precision. Only the arithmetic may differ from the machine's: it is that of matrix units, which
    accumulate in float32 and round once.
    """

    def __init__(self, format: Format) -> None:
        self._low = format.dtype
        self._name = dtype_name(format.dtype)
        self._dtypes: dict[Any, tuple[torch.dtype, ...]] = {}

    def run(self, func: Any, args: Args, kwargs: Kwargs, context: OpContext) -> Any:
        """Run an op below autograd as hardware with the format would, and return its result."""
        if casts_to(func, args, kwargs) == self._name:
            context.note(args[1] if op_name(func) == "copy_" else args[0])
        elif self._computes_in_place(func, args, kwargs):
            return self._run_in_place(func, args, kwargs, context)
        elif self._computes(func, args, kwargs):
            key = (func, _kind(args), _kind(kwargs))
            dtypes = self._dtypes.get(key) or _result_dtypes(func, args, kwargs)
            if dtypes:  # not cached if empty: the call may have been invalid
                self._dtypes[key] = dtypes
            if self._low in dtypes:
                return self._run_wide(func, args, kwargs, dtypes, context)
        return func(*args, **kwargs)

    def _computes(self, func: Any, args: Args, kwargs: Kwargs) -> bool:
        name = op_name(func)
        if func.is_view or schema_of(func).is_mutable or name in _MOVE or func.namespace != "aten":
            return False
        if not any(t.dtype is self._low for t in tensors_in((args, kwargs))):
            return False
        if "attention" in name:  # on CUDA the fused ops have no float32 form
            return "_for_cpu" in name or "efficient" in name
        if "batch_norm" in name:  # it updates running statistics in place: no copies
            return args[3] is None or args[3].dtype is not self._low
        if name in ("_softmax", "_log_softmax"):  # half_to_float is invalid for float32 inputs
            return not args[2]
        return torch.Tag.nondeterministic_seeded not in func.tags  # their draws would differ

    def _computes_in_place(self, func: Any, args: Args, kwargs: Kwargs) -> bool:
        """Return whether an op computes and writes to a tensor in lower precision."""
        name = op_name(func)
        if not schema_of(func).is_mutable or name in _MOVE or func.namespace != "aten":
            return False
        if not (torch.Tag.pointwise in func.tags or name in ("addmm_", "baddbmm_", "addmv_")):
            return False
        written = written_to(func, args, kwargs)
        is_first = len(written) == 1 and bool(args) and written[0] is args[0]
        return is_first and isinstance(args[0], Tensor) and args[0].dtype is self._low

    def _wide(self, values: Any) -> Any:
        return map_tensors(lambda t: t.float() if t.dtype is self._low else t, values)

    def _run_in_place(self, func: Any, args: Args, kwargs: Kwargs, context: OpContext) -> Any:
        wide = self._wide(args)
        func(*wide, **self._wide(kwargs))
        context.note(wide[0])
        args[0].copy_(wide[0])
        return args[0]

    def _run_wide(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
        dtypes: tuple[torch.dtype, ...],
        context: OpContext,
    ) -> Any:
        asked = [torch.float32 if arg is self._low else arg for arg in args]
        named = {k: torch.float32 if arg is self._low else arg for k, arg in kwargs.items()}
        result = func(*self._wide(asked), **self._wide(named))
        left = iter(dtypes)

        def narrowed(tensor: Tensor) -> Tensor:
            if next(left) is not self._low:
                return tensor
            context.note(tensor)
            return tensor.to(self._low)

        return map_tensors(narrowed, result)


def _kind(value: Any) -> Any:
    """Return a key with everything that the dtypes of results may depend on."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim() == 0
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((key, _kind(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, (bool, torch.dtype)) else type(value)


def _result_dtypes(func: Any, args: Args, kwargs: Kwargs) -> tuple[torch.dtype, ...]:
    """Return the dtypes of an op's results, computed on meta tensors.

    Empty if the op cannot run on meta tensors.
    """

    def empty(tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            raise NotImplementedError("its size is not a tuple of numbers")
        size, stride = tensor.size(), tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")

    named = {k: "meta" if isinstance(v, torch.device) else v for k, v in kwargs.items()}
    try:
        with modes.unseen_by_modes():
            result = func(*map_tensors(empty, args), **map_tensors(empty, named))
    except (NotImplementedError, RuntimeError):  # its result may depend on values
        return ()
    return tuple(tensor.dtype for tensor in tensors_in((result,)))


# The positions of the operands that matrix units multiply. The others, such as the bias, are added
# to the sums of the products, in float32.
_OPERANDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "conv_tbc", "convolution"), (0, 1)),
    **dict.fromkeys(("addmm", "_addmm_activation", "addbmm", "baddbmm", "addmv", "addr"), (1, 2)),
    **dict.fromkeys(("conv_tbc_backward", "convolution_backward"), (0, 1, 2)),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3),
    "_scaled_dot_product_efficient_attention": (0, 1, 2),
    "_scaled_dot_product_efficient_attention_backward": (0, 1, 2, 3),
}


class Float8Arithmetic:
    """Arithmetic in float8: the operands of lowered products are clipped and rounded.

    Results are not rounded. Operands are counted in the forward pass. In the backward pass they are
    rounded again, but only the incoming gradients are counted, each once.

    With ``scale_by_amax`` each operand is scaled, for rounding, by the power of two that brings its
    largest magnitude just below the largest value of the format.
    """

    def __init__(self, format: Format, *, scale_by_amax: bool) -> None:
        self._format = format
        self._scale_by_amax = scale_by_amax
        self._counted: dict[tuple[str, int], Any] = {}  # with a reference that keeps the key unique
        self._is_behind = False

    def run(self, func: Any, args: Args, kwargs: Kwargs, context: OpContext) -> Any:
        """Run an op below autograd as hardware with the format would, and return its result."""
        places = _OPERANDS.get(op_name(func), ()) if context.is_lowered else ()
        given = [args[place] for place in places]
        # Matrix units do not support sparse tensors.
        if not all(t.dtype is torch.float32 and t.layout is torch.strided for t in given):
            return func(*args, **kwargs)
        operands = list(args)
        for place in places:
            operands[place] = self._rounded(args[place], context)
        return func(*operands, **kwargs)

    def _rounded(self, operand: Tensor, context: OpContext) -> Tensor:
        scale = _scale(operand, self._format) if self._scale_by_amax else None
        values = operand if scale is None else operand * scale
        if self._is_to_count(operand, context):
            context.note(_without_repeats(values))
        held = rounded(values, self._format, saturate=True)
        return held if scale is None else held / scale

    def _is_to_count(self, operand: Tensor, context: OpContext) -> bool:
        is_backward = context.phase == "backward"
        if self._is_behind and context.phase == "forward":  # a new step
            self._counted.clear()
        self._is_behind = is_backward
        reference = storages.memory_of(operand)
        key = (context.module, reference.cdata)
        is_new = key not in self._counted
        self._counted[key] = reference
        return is_new or not is_backward


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return an expanded tensor without its repetitions."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    return tensor


def _scale(values: Tensor, format: Format) -> Tensor:
    """Return the largest power of two by which all finite values can be multiplied."""
    sizes = values.abs()
    amax = torch.where(sizes < math.inf, sizes, 0.0).amax() if values.numel() else sizes.sum()
    _, exponent = torch.frexp(amax)  # amax < 2 ** exponent
    _, of_largest = math.frexp(format.largest)
    # The bits of a float32 power of two that is neither subnormal nor inf.
    bits = ((of_largest - 1 - exponent).clamp(-126, 126) + 127) << 23
    scale: Tensor = bits.to(torch.int32).view(torch.float32)
    return scale


Arithmetic: TypeAlias = HalfArithmetic | Float8Arithmetic
