"""Statistics of tensor values: counts, extremes and a histogram, as plain numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import itemgetter

from msgspec import Struct

from halfstep._common.formats import FORMATS, Format
from halfstep._tools.json import Count, Magnitude, Positive


class Statistics(Struct, frozen=True, gc=False):
    """Counts, extremes and a histogram of magnitudes.

    Statistics are additive: ``merged`` combines those of several ranks, or of several calls of a
    module, exactly.

    Attributes:
        size: Number of entries.
        measured: Number of counted entries: all, or a sample.
        zeros: Number of zeros.
        nan: Number of NaNs.
        inf: Number of entries that are inf or -inf.
        amax: The largest finite magnitude; 0 if there is none.
        amin: The smallest magnitude above zero; None if there is none.
        first: The exponent of the first bin of the histogram; 0 if it has none.
        histogram: Number of finite entries by exponent: ``e`` stands for magnitudes in (2**(e-1),
            2**e].
        underflow: By the name of a format, the number of nonzero entries that it rounds to zero.
        overflow: By the name of a format, the number of finite entries that overflow in it.
        flushed: Least number of zeros due to underflow in a gradient that has passed through
            float16, as estimated by ``measure``. None for other gradients, those without values
            small enough to tell, and other tensors.
        updates: For a weight that an optimizer has stepped, the number of inspected entries whose
            gradient was not zero; None for other tensors.
        lost_updates: Number of these entries that the step did not change.
    """

    size: Count
    measured: Count
    zeros: Count
    nan: Count
    inf: Count
    amax: Magnitude
    amin: Positive | None
    first: int
    histogram: tuple[Count, ...]
    underflow: dict[str, Count]
    overflow: dict[str, Count]
    flushed: Count | None = None
    updates: Count | None = None
    lost_updates: Count | None = None

    def share(self, count: int) -> float:
        """Return a count as a fraction of the measured entries that are finite, 0 to 1."""
        return count / max(self.measured - self.nan - self.inf, 1)

    def lost(self, format: Format = FORMATS["fp16"]) -> int:
        """Return the number of entries that underflow in a format, or have underflowed."""
        return self.underflow[format.name] + (self.flushed or 0 if format.name == "fp16" else 0)

    def underflow_if(self, factor: float, format: Format) -> int:
        """Return the number of measured entries that would underflow if multiplied by a factor.

        It is exact for powers of two (float32 subnormals count as one bin); between two powers it
        is the count for the smaller one. Entries that are already zero are not counted.
        """
        last = math.floor(math.log2(format.flushed_below / factor))
        return sum(self.histogram[: max(last + 1 - self.first, 0)])

    def headroom(self, format: Format) -> float | None:
        """Return the bits between amax and the largest value of a format; None without amax."""
        return math.log2(format.largest / self.amax) if self.amax else None

    def by_exponent(self) -> dict[int, int]:
        """Return the non-empty bins of the histogram."""
        return {e: count for e, count in enumerate(self.histogram, start=self.first) if count}


def binned(by_exponent: Mapping[int, int]) -> tuple[int, tuple[int, ...]]:
    """Return the exponent of the first bin of a histogram, and the counts of all bins."""
    first = min(by_exponent, default=0)
    exponents = range(first, max(by_exponent, default=-1) + 1)
    return first, tuple([by_exponent.get(e, 0) for e in exponents])


def merged(statistics: Iterable[Statistics]) -> Statistics:
    """Return the combined statistics of several parts, at least one."""
    parts = tuple(statistics)
    if not parts:
        raise TypeError("there are no statistics to merge")
    by_exponent: Counter[int] = Counter()
    for part in parts:
        by_exponent.update(part.by_exponent())
    first, histogram = binned(by_exponent)
    return Statistics(
        size=sum([part.size for part in parts]),
        measured=sum([part.measured for part in parts]),
        zeros=sum([part.zeros for part in parts]),
        nan=sum([part.nan for part in parts]),
        inf=sum([part.inf for part in parts]),
        amax=max([part.amax for part in parts]),
        amin=min((part.amin for part in parts if part.amin is not None), default=None),
        first=first,
        histogram=histogram,
        underflow=_sum([part.underflow for part in parts]),
        overflow=_sum([part.overflow for part in parts]),
        flushed=_sum_of_known([part.flushed for part in parts]),
        updates=_sum_of_known([part.updates for part in parts]),
        lost_updates=_sum_of_known([part.lost_updates for part in parts]),
    )


def _sum(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(map(itemgetter(name), counts)) for name in FORMATS}


def _sum_of_known(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
