"""Which ops round values to zero: each is computed in float32 too, and both are compared.

What an op reads may have been flushed before; that is told of the op that did it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep._autocast.casts import tensors_in
from halfstep._diagnose.diagnosis import Flush, Line
from halfstep._diagnose.lines import user_line
from halfstep._diagnose.looking import in_wider
from halfstep._diagnose.watcher import OpCall, Witness
from halfstep._numerics.formats import FORMATS_BY_DTYPE
from halfstep._trace.ops import makes_no_values
from halfstep._trace.rows import Phase, dtype_name

SCALE_FACTORS = (2.0**-8, 2.0**-4, 2.0**4, 2.0**8)
"""The other scales, as multiples of the present one."""

_LARGEST_SCALE = 2.0**24
_Key = tuple[str, str, Phase, str, Line | None]


@dataclass
class _Counts:
    values: int = 0
    flushed: int = 0
    at_scales: dict[float, int] = field(default_factory=dict)


class Flushes(Witness):
    """Counts what each op flushes.

    Args:
        scale: The scale of the loss, None without one.

    Sync: one for each op that returns lower precision.
    """

    def __init__(self, scale: float | None) -> None:
        factors = () if scale is None else SCALE_FACTORS
        self._scales = {f * scale: f for f in factors if scale and 1 <= f * scale <= _LARGEST_SCALE}
        self._counts: dict[_Key, _Counts] = {}
        self._lines: dict[int, Line | None] = {}
        self._wide: list[Tensor] | None = None

    def before(self, call: OpCall) -> None:
        """Compute the op in float32; it may write to what it reads."""
        if call.phase != "backward":
            self._lines[call.number] = user_line()
        self._wide = _in_float32(call)

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Count what is zero and should not be."""
        wide, self._wide = self._wide, None
        if wide is None or len(wide) != len(outputs):
            return
        number = call.place.number if call.phase == "backward" else call.number
        line = self._lines.get(number)
        for result, exact in zip(outputs, wide, strict=True):
            format = FORMATS_BY_DTYPE.get(dtype_name(result.dtype))
            if format is None or result.shape != exact.shape:
                continue
            key = (call.name, call.place.module, call.phase, dtype_name(result.dtype), line)
            counts = self._counts.setdefault(key, _Counts())
            is_value = exact != 0
            scaled = self._scales if call.phase == "backward" else {}
            magnitudes = exact.abs()
            found = [is_value.sum(), ((result == 0) & is_value).sum()]
            found += [
                ((magnitudes <= format.flushed_below / factor) & is_value).sum()
                for factor in scaled.values()
            ]
            values, flushed, *others = torch.stack(found).tolist()
            counts.values += values
            counts.flushed += flushed
            for scale, count in zip(scaled, others, strict=True):
                counts.at_scales[scale] = counts.at_scales.get(scale, 0) + count

    def found(self) -> tuple[Flush, ...]:
        """Return the ops that flush something, those that flush the largest share first."""
        flushes = [
            Flush(*key, counts.values, counts.flushed, tuple(counts.at_scales.items()))
            for key, counts in self._counts.items()
            if counts.flushed
        ]
        return tuple(sorted(flushes, key=lambda flush: -flush.share))


def _in_float32(call: OpCall) -> list[Tensor] | None:
    """Return what an op returns in float32, None if it returns no lower precision or cannot."""
    is_random = torch.Tag.nondeterministic_seeded in call.func.tags
    if makes_no_values(call.func) or is_random or not _may_flush(call):
        return None
    if call.name == "copy_":
        return [call.args[1].detach().float()]
    try:
        result = in_wider(call, torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return list(tensors_in([result]))


def _may_flush(call: OpCall) -> bool:
    lower = (torch.float16, torch.bfloat16)
    asked = call.kwargs.get("dtype")
    return asked in lower or any(tensor.dtype in lower for tensor in call.given)
