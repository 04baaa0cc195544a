"""What is known of the values of a tensor: counts, extremes and a histogram, as plain numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

from halfstep.numerics.formats import FORMATS, Format

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Statistics:
    """Counts, extremes and a histogram of magnitudes.

    Everything adds up: what several ranks, or several calls of a module, have seen is combined
    exactly by :meth:`merged`.

    Attributes:
        size: Number of entries.
        measured: How many of them the counts and the histogram are of: all, or a sample.
        zeros: Entries that are zero.
        nan: Entries that are NaN.
        inf: Entries that are inf or -inf.
        amax: The largest finite magnitude; 0 if there is none.
        amin: The smallest magnitude above zero; None if there is none.
        histogram: Finite entries by exponent: ``e`` stands for magnitudes in (2**(e-1), 2**e].
        underflow: By the name of a format, the entries above zero that it rounds to zero.
        overflow: By the name of a format, the finite entries that it cannot hold.
        flushed: Of a gradient that has passed through float16: the zeros that underflow has made,
            as :func:`halfstep.numerics.measure.measure` tells them. None if it has not, or if it
            holds nothing so small that it could be told, and for anything else.
        square_sum: Sum of the squares of all entries; None if it was not asked for.
    """

    size: int
    measured: int
    zeros: int
    nan: int
    inf: int
    amax: float
    amin: float | None
    histogram: Mapping[int, int]
    underflow: Mapping[str, int]
    overflow: Mapping[str, int]
    flushed: int | None = None
    square_sum: float | None = None

    def share(self, count: int) -> float:
        """Return a count as a share of what was measured, 0 to 1."""
        return count / self.measured if self.measured else 0.0

    def lost(self, format: Format = FORMATS["fp16"]) -> int:
        """Return how many entries are zero in a format because of underflow."""
        return self.underflow[format.name] + (self.flushed or 0 if format.name == "fp16" else 0)

    def underflow_if(self, factor: float, format: Format) -> int:
        """Return how many measured entries would underflow if all were multiplied by a factor.

        Exact for a power of two (float32 subnormals count as one bin); between two powers it is the
        count at the smaller one. What has been flushed already is not known any more.
        """
        if not self.histogram:
            return 0
        last = math.floor(math.log2(format.flushed_below / factor))
        return sum(count for exponent, count in self.histogram.items() if exponent <= last)

    def headroom(self, format: Format) -> float | None:
        """Return the bits between amax and the largest value of a format; None without amax."""
        return math.log2(format.largest / self.amax) if self.amax else None

    def with_gradient(self, flushed: int | None, square_sum: float) -> Self:
        """Return the same with what is asked of gradients only."""
        return replace(self, flushed=flushed, square_sum=square_sum)

    def merged(self, other: Statistics) -> Statistics:
        """Return the statistics of both together."""
        return merged((self, other))

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the histogram as its first exponent and a list of counts."""
        exponents = self.histogram.keys()
        first = min(exponents, default=0)
        counts = [self.histogram.get(e, 0) for e in range(first, max(exponents, default=-1) + 1)]
        values = {name: getattr(self, name) for name in _NAMES}
        return values | {
            "histogram": counts,
            "first": first,
            "underflow": dict(self.underflow),
            "overflow": dict(self.overflow),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what :meth:`to_json` was called on; other keys are ignored."""
        known = {name: values[name] for name in _NAMES}
        bins = enumerate(values["histogram"], start=values["first"])
        return cls(**known | {"histogram": {e: count for e, count in bins if count}})


_NAMES = tuple(field.name for field in fields(Statistics))


def merged(statistics: Iterable[Statistics]) -> Statistics:
    """Return the statistics of all together.

    Raises:
        TypeError: There are none.
    """
    parts = tuple(statistics)
    if not parts:
        raise TypeError("there are no statistics to put together")
    return Statistics(
        size=sum([part.size for part in parts]),
        measured=sum([part.measured for part in parts]),
        zeros=sum([part.zeros for part in parts]),
        nan=sum([part.nan for part in parts]),
        inf=sum([part.inf for part in parts]),
        amax=max([part.amax for part in parts]),
        amin=min((part.amin for part in parts if part.amin is not None), default=None),
        histogram=_sum(part.histogram for part in parts),
        underflow=_sum(part.underflow for part in parts),
        overflow=_sum(part.overflow for part in parts),
        flushed=_sum_of_known(part.flushed for part in parts),
        square_sum=_sum_of_known(part.square_sum for part in parts),
    )


def _sum(counts: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    total: defaultdict[_Key, int] = defaultdict(int)
    for each in counts:
        for key, count in each.items():
            total[key] += count
    return dict(total)


def _sum_of_known(values: Iterable[_Number | None]) -> _Number | None:
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None
