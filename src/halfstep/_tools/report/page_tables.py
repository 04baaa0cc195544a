"""The table of layers on the page, with their histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from halfstep._common.formats import FORMATS
from halfstep._tools.record.run import Kind
from halfstep._tools.report.page_curves import Axis, Tick
from halfstep._tools.report.summary import NOTABLE, Layer, Summary

KIND_TITLES: dict[Kind, str] = {
    "output": "Outputs",
    "output_gradient": "Output gradients",
    "parameter_gradient": "Parameter gradients",
    "parameter": "Parameters",
}

MOST_HISTOGRAMS = 240
HEIGHT = 26
"""The height of a histogram, in pixels and in units."""

_LOWEST, _HIGHEST = -72, 48
"""The range of exponents; the bins at the ends include all beyond it."""
_DECADES = 6


class FormatWindow(NamedTuple):
    """The range of a format on the axis of exponents, in units from the lower end."""

    name: str
    flushed: float  # below it, values become zero
    normal: float  # from it on, values have full precision
    largest: float
    title: str  # the limits in numbers


class Exponents(NamedTuple):
    """The common axis of all histograms, from the lower end of the first bin to the last end."""

    low: int
    high: int
    ticks: list[Tick]
    windows: list[FormatWindow]

    @property
    def width(self) -> int:
        return self.high - self.low


class LayerRow(NamedTuple):
    """One line of the table: a layer, its index in the summary, and its histogram."""

    number: int
    layer: Layer
    histogram: str | None


class LayerTable(NamedTuple):
    """The table of layers, the worst first; the first ones have a histogram."""

    rows: list[LayerRow]
    axis: Exponents
    num_histograms: int


def layer_table(summary: Summary) -> LayerTable:
    axis = exponents_of(summary.layers)
    rows = []
    num_histograms = 0
    for index, layer in sorted(enumerate(summary.layers), key=lambda each: badness(each[1])):
        path = None
        if layer.histogram and num_histograms < MOST_HISTOGRAMS:
            path = histogram(layer, axis)
            num_histograms += 1
        rows.append(LayerRow(index, layer, path))
    return LayerTable(rows, axis, num_histograms)


def badness(layer: Layer) -> tuple[float, ...]:
    """Return a sort key that puts the worst layer first.

    Layers with NaN come first, then those with inf, then those with values outside the format. The
    rest are sorted by losses (underflow and updates), then by headroom; that of a float32 tensor,
    in a format that it is not in, comes after. Parameters without notable losses of updates come
    last, because their dtype does not change.
    """
    headroom = math.inf if layer.headroom is None else layer.headroom
    lost = (layer.share_lost_updates or 0.0) if layer.is_low_weight else 0.0
    is_moving = layer.kind == "parameter" and lost < NOTABLE
    return (
        -float(layer.nan > 0),
        -float(layer.inf > 0),
        -float(headroom < 0 and not layer.is_hypothetical),
        float(is_moving),
        -round(max(layer.share_lost, 0.0 if is_moving else lost), 6),
        float(layer.is_hypothetical),
        headroom,
    )


# --- histograms -----------------------------------------------------------------------------------


def exponents_of(layers: Iterable[Layer]) -> Exponents:
    """Return an axis that spans all histograms and the range of fp16, within limits."""
    seen = [exponent for layer in layers for exponent in layer.histogram]
    low = max(_LOWEST, min([*seen, -25]) - 2)
    high = min(_HIGHEST, max([*seen, 16]) + 2)
    tens = [exponent for exponent in range(low, high + 1) if exponent % 10 == 0]
    ticks = Axis(low, high).ticks(tens, str)
    return Exponents(low, high, ticks, [_window(name, low, high) for name in FORMATS])


def _window(name: str, low: int, high: int) -> FormatWindow:
    def place(value: float) -> float:
        return round(min(high, max(low, math.log2(value))) - low, 2)

    format = FORMATS[name]
    smallest = math.log2(format.smallest_subnormal)
    return FormatWindow(
        name,
        place(format.flushed_below),
        place(format.smallest_normal),
        place(format.largest),
        f"{name}: smallest subnormal 2^{smallest:g}, smallest normal "
        f"2^{math.log2(format.smallest_normal):g}, largest {format.largest:.6g}",
    )


def histogram(layer: Layer, axis: Exponents) -> str:
    """Return the outline of a histogram; heights are logarithmic in the share of entries."""
    counts = [0] * axis.width
    for exponent, count in layer.histogram.items():
        # Bin e ends at 2^e, so it lies left of e.
        counts[min(axis.width - 1, max(0, exponent - 1 - axis.low))] += count
    total = sum(counts)
    top = HEIGHT - 2
    heights = [
        max(1, round(top * (1 + math.log10(count / total) / _DECADES))) if count else 0
        for count in counts
    ]
    start = next(i for i, height in enumerate(heights) if height)
    end = len(heights) - next(i for i, height in enumerate(reversed(heights)) if height)
    return bars(heights[start:end], HEIGHT, start)


def bars(heights: Sequence[int], height: int, start: int = 0) -> str:
    """Return the outline of adjacent bars, each one unit wide, at the lower edge of a drawing."""
    path, before = f"M{start} {height}", 0
    for at, alike in groupby(heights):
        path += f"v{before - at}h{len(list(alike))}"
        before = at
    return f"{path}V{height}z"


def format_limits(axis: Exponents) -> Sequence[float]:
    """Return the limits of all formats for the thin lines in the histograms."""
    places = {place for w in axis.windows for place in (w.flushed, w.normal, w.largest)}
    return sorted(place for place in places if 0 < place < axis.width)
