"""The scalars of a step and of a sample, which sinks receive (see :mod:`halfstep.sinks`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfstep._numerics.formats import FORMATS, FORMATS_BY_DTYPE
from halfstep._record.run import Measured


def step_scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars of a step from its line in the record."""
    names = ("loss", "scale", "norm", "share_lost_updates")
    known = {name: event[name] for name in names if event[name] is not None}
    return known | {"skipped": float(not event["taken"])}


def sample_scalars(tensors: Sequence[Measured]) -> dict[str, float]:
    """Return the scalars of a sampled step from its measured tensors."""
    headrooms, underflows, non_finite = [], [0.0], 0
    for tensor in tensors:
        headroom = tensor.headroom(FORMATS_BY_DTYPE.get(tensor.dtype, FORMATS["fp16"]))
        if headroom is not None:
            headrooms.append(headroom)
        if tensor.kind == "parameter_gradient":
            underflows.append(tensor.share(tensor.lost()))
        non_finite += bool(tensor.nan or tensor.inf)
    scalars = {"underflow": max(underflows), "non_finite": float(non_finite)}
    return scalars | ({"headroom": min(headrooms)} if headrooms else {})
