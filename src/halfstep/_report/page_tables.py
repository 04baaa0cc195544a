"""The tables of the page: layers with their histograms, and the precision map of the modules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halfstep._numerics.formats import FORMATS
from halfstep._report.drawing import Tick, bars
from halfstep._report.page_heat import KIND_TITLES
from halfstep._report.summary import Layer, Summary
from halfstep._trace.recording import Recording
from halfstep._trace.rows import Row, grouped, short

MOST_HISTOGRAMS = 240
HEIGHT = 26
"""Of a histogram, in pixels and in units."""

_LOWEST, _HIGHEST = -72, 48
"""Exponents beyond these are drawn in the bins at the ends."""
_DECADES = 6


@dataclass(frozen=True)
class FormatWindow:
    """The range of a format on the axis of exponents, in units from the lower end.

    Attributes:
        name: Of the format.
        flushed: Below this, everything becomes zero.
        normal: From here on, values have full precision.
        largest: The format cannot hold anything above this.
        title: The three limits in numbers.
    """

    name: str
    flushed: float
    normal: float
    largest: float
    title: str


@dataclass(frozen=True)
class Exponents:
    """The axis that all histograms share.

    Attributes:
        low: Lower end of the first bin.
        high: Upper end of the last bin.
        ticks: With labels.
        windows: Of all formats.
    """

    low: int
    high: int
    ticks: list[Tick]
    windows: list[FormatWindow]

    @property
    def width(self) -> int:
        """Number of bins."""
        return self.high - self.low


@dataclass(frozen=True)
class LayerRow:
    """One line of the table.

    Attributes:
        index: In ``layers`` of the summary.
        layer: The numbers.
        kind: In words.
        histogram: Its SVG path; None if the layer has no histogram.
    """

    index: int
    layer: Layer
    kind: str
    histogram: str | None


@dataclass(frozen=True)
class LayerTable:
    """The whole table.

    Attributes:
        rows: The worst first.
        axis: Of the histograms.
        num_histograms: How many rows have one.
    """

    rows: list[LayerRow]
    axis: Exponents
    num_histograms: int


def layer_table(summary: Summary) -> LayerTable:
    """Return the layers of a run, the worst first."""
    axis = exponents_of(summary.layers)
    order = sorted(range(len(summary.layers)), key=lambda i: badness(summary.layers[i]))
    rows = []
    num_histograms = 0
    for index in order:
        layer = summary.layers[index]
        path = None
        if layer.histogram and num_histograms < MOST_HISTOGRAMS:
            path = histogram(layer, axis)
            num_histograms += 1
        rows.append(LayerRow(index, layer, KIND_TITLES[layer.kind], path))
    return LayerTable(rows, axis, num_histograms)


def badness(layer: Layer) -> tuple[float, ...]:
    """Return a key by which the worst layer comes first.

    Layers with NaN come first, then inf, then values outside the format; the rest are sorted by
    losses to underflow, then by headroom. Parameters come last, as their dtype does not change.
    """
    headroom = math.inf if layer.headroom is None else layer.headroom
    return (
        -float(layer.nan > 0),
        -float(layer.inf > 0),
        -float(headroom < 0),
        float(layer.kind == "parameter"),
        -round(layer.share_lost_worst, 6),
        headroom,
    )


# --- histograms -----------------------------------------------------------------------------------


def exponents_of(layers: Iterable[Layer]) -> Exponents:
    """Return an axis that spans all histograms and the range of fp16."""
    seen = [exponent for layer in layers for exponent in layer.histogram]
    low = max(_LOWEST, min([*seen, -25]) - 2)
    high = min(_HIGHEST, max([*seen, 16]) + 2)
    ticks = [
        (round(100 * (exponent - low) / (high - low), 2), str(exponent))
        for exponent in range(low, high + 1)
        if exponent % 10 == 0
    ]
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
    """Return the outline of a histogram; heights are logarithms of the share of entries."""
    counts = [0] * axis.width
    for exponent, count in layer.histogram.items():
        # Bin e ends at 2^e, so it lies left of e.
        counts[min(axis.width - 1, max(0, exponent - 1 - axis.low))] += count
    total = sum(counts)
    heights = [_height(count / total) for count in counts]
    start = next(i for i, height in enumerate(heights) if height)
    end = len(heights) - next(i for i, height in enumerate(reversed(heights)) if height)
    return bars(heights[start:end], HEIGHT, start)


def _height(share: float) -> int:
    if share == 0:
        return 0
    return max(1, round((HEIGHT - 2) * (1 + math.log10(share) / _DECADES)))


def format_limits(axis: Exponents) -> Sequence[float]:
    """Return the limits of all formats, for the thin lines in the histograms."""
    places = {place for w in axis.windows for place in (w.flushed, w.normal, w.largest)}
    return sorted(place for place in places if 0 < place < axis.width)


# --- precision map --------------------------------------------------------------------------------


MOST_MODULES = 40
CASTS = "casts"
"""The name used in place of a dtype for casts."""


@dataclass(frozen=True)
class Part:
    """The ops that ran in one dtype.

    Attributes:
        dtype: Its short name, or ``"casts"``.
        ops: Number of ops.
        seconds: Their time.
    """

    dtype: str
    ops: int
    seconds: float


@dataclass(frozen=True)
class ModulePrecision:
    """The ops of a module and the modules inside it.

    Attributes:
        name: Path of the module; empty for all together.
        parts: By dtype.
    """

    name: str
    parts: tuple[Part, ...]

    @property
    def ops(self) -> int:
        """Number of ops."""
        return sum(part.ops for part in self.parts)

    @property
    def seconds(self) -> float:
        """Time of all."""
        return sum(part.seconds for part in self.parts)

    def share_of_ops(self, dtype: str) -> float:
        """Return the share of the ops that ran in a dtype."""
        return sum(p.ops for p in self.parts if p.dtype == dtype) / max(1, self.ops)

    def share_of_time(self, dtype: str) -> float:
        """Return the share of the time that went into a dtype."""
        seconds = sum(p.seconds for p in self.parts if p.dtype == dtype)
        return seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class PrecisionMap:
    """The whole map.

    Attributes:
        dtypes: All of them, most time first.
        total: All modules together.
        modules: In the order in which they ran.
        environment: Versions, device and policy of the trace.
    """

    dtypes: list[str]
    total: ModulePrecision
    modules: list[ModulePrecision]
    environment: dict[str, str]


def precision_map(trace: Recording) -> PrecisionMap:
    """Return time and ops by dtype from a trace."""
    total = _precision("", trace.ops)
    depth = _depth([row.module for row in trace.ops])
    modules = grouped(trace.ops, lambda row: ".".join(row.module.split(".")[:depth]))
    return PrecisionMap(
        [part.dtype for part in sorted(total.parts, key=lambda p: (-p.seconds, -p.ops))],
        total,
        [_precision(name, rows) for name, rows in modules.items()],
        trace.environment,
    )


def _depth(paths: Sequence[str]) -> int:
    """Return how many parts of each path to keep, so that few enough modules remain."""
    deepest = max((path.count(".") + 1 for path in paths), default=1)
    for depth in range(deepest, 1, -1):
        if len({".".join(path.split(".")[:depth]) for path in paths}) <= MOST_MODULES:
            return depth
    return 1


def _precision(name: str, rows: Iterable[Row]) -> ModulePrecision:
    ops: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for row in rows:
        if row.cast_seconds or row.is_cast_only:
            seconds[CASTS] = seconds.get(CASTS, 0.0) + row.cast_seconds
        if not row.is_cast_only:
            dtype = short(row.compute)
            ops[dtype] = ops.get(dtype, 0) + 1
            seconds[dtype] = seconds.get(dtype, 0.0) + row.seconds
        if row.casts:
            ops[CASTS] = ops.get(CASTS, 0) + len(row.casts)
    dtypes = dict.fromkeys((*ops, *seconds))
    return ModulePrecision(
        name, tuple(Part(dtype, ops.get(dtype, 0), seconds.get(dtype, 0.0)) for dtype in dtypes)
    )
