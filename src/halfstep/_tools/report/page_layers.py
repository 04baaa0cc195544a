"""The layers of a run on its page: a table with histograms, and heat maps by sampled step."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from halfstep._common.formats import FORMATS
from halfstep._common.numbers import bits, count, percent
from halfstep._tools.record.run import Kind, Run
from halfstep._tools.report.layers import SampledTensor, sampled
from halfstep._tools.report.page_curves import Axis, Tick, round_numbers
from halfstep._tools.report.summary import NOTABLE, Layer, Summary
from halfstep._tools.trace.rows import grouped

KIND_TITLES: dict[Kind, str] = {
    "output": "Outputs",
    "output_gradient": "Output gradients",
    "parameter_gradient": "Parameter gradients",
    "parameter": "Parameters",
}

MOST_HISTOGRAMS = 240
HEIGHT = 26  # the height of a histogram, in pixels and in units

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
    worst_first = sorted(enumerate(summary.layers), key=lambda each: badness(each[1]))
    drawn = [index for index, layer in worst_first if layer.histogram][:MOST_HISTOGRAMS]
    paths = {index: histogram(summary.layers[index], axis) for index in drawn}
    rows = [LayerRow(index, layer, paths.get(index)) for index, layer in worst_first]
    return LayerTable(rows, axis, len(drawn))


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
    for exponent, num in layer.histogram.items():
        # Bin e ends at 2^e, so it lies left of e.
        counts[min(axis.width - 1, max(0, exponent - 1 - axis.low))] += num
    total = sum(counts)
    top = HEIGHT - 2
    heights = [
        max(1, round(top * (1 + math.log10(num / total) / _DECADES))) if num else 0
        for num in counts
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


# --- heat maps ------------------------------------------------------------------------------------

MOST_COLUMNS, MOST_CELLS = 240, 160_000
LABEL_HEIGHT, LABEL_LETTERS = 12, 24


class HeatMap(NamedTuple):
    """One picture."""

    levels: Levels
    image: str  # a data URI, with one pixel per cell
    not_finite: list[tuple[float, float]]  # the first cell with NaN or inf of each row, its centre


class Tab(NamedTuple):
    """The maps of one kind of tensor: headroom and underflow."""

    kind: Kind
    rows: list[tuple[int, str]]  # from top to bottom: number in the summary, name and worst values
    row_height: int  # in pixels
    labels: list[tuple[float, str, str]]  # centre in pixels, text, full name: where there is room
    maps: list[HeatMap]
    num_troubled: int  # layers with inf or NaN, no headroom, or notable underflow


class Heat(NamedTuple):
    """All maps, with a tab for each kind of tensor."""

    tabs: list[Tab]
    opened: Kind  # the tab that is open at first: the one with the worst layer
    columns: list[tuple[int, int]]  # the first and last step of each
    ticks: list[Tick]
    num_samples: int


def heat(summary: Summary, run: Run) -> Heat | None:
    """Return the maps of a run; None if nothing was sampled."""
    if not summary.layers:
        return None
    num_samples = len(run.samples)
    num = min(num_samples, MOST_COLUMNS, max(60, MOST_CELLS // len(summary.layers)))
    column_of = [index * num // num_samples for index in range(num_samples)]
    by_column = grouped(range(num_samples), column_of.__getitem__).values()
    columns = [(run.samples[each[0]].step, run.samples[each[-1]].step) for each in by_column]
    cells = _cells(run, column_of, summary)
    tabs = [_tab(kind, summary, cells, num) for kind in KIND_TITLES if summary.of_kind(kind)]
    troubled = [layer for layer in summary.layers if _is_troubled(layer, summary)]
    opened = min(troubled, key=badness).kind if troubled else tabs[0].kind
    return Heat(tabs, opened, columns, ticks_of(columns), num_samples)


def _is_troubled(layer: Layer, summary: Summary) -> bool:
    """Return whether a layer had inf or NaN, no headroom, or notable underflow.

    The inf and NaN of steps that dynamic scaling skipped are normal.
    """
    steps = summary.steps
    is_odd = layer.non_finite_step not in (None, *steps.start_up, *steps.after_growth)
    is_outside = layer.headroom is not None and layer.headroom < 0
    return is_odd or is_outside or layer.share_lost >= NOTABLE


def ticks_of(columns: Sequence[tuple[int, int]]) -> list[Tick]:
    """Return the ticks of the axis: the first column and round step numbers."""
    found = {0: columns[0][0]}
    for step in round_numbers(columns[0][0], columns[-1][1], 5, smallest=1):
        column = next(c for c, (_, last) in enumerate(columns) if last >= step)
        found.setdefault(column, max(round(step), columns[column][0]))
    places = sorted(found)
    if len(places) > 1 and places[1] < 0.08 * len(columns):
        del found[0]  # no room for both labels
    return [(100 * (c + 0.5) / len(columns), f"{step:,}") for c, step in sorted(found.items())]


# --- cells ----------------------------------------------------------------------------------------


_Cell: TypeAlias = list[SampledTensor]  # one layer in the samples of one column
_Cells: TypeAlias = Mapping[tuple[Kind, str], Mapping[int, _Cell]]


def _cells(run: Run, column_of: Sequence[int], summary: Summary) -> _Cells:
    found: _Cells = defaultdict(lambda: defaultdict(list))
    for column, sample in zip(column_of, run.samples, strict=True):
        for each in sampled(sample, summary.policies):
            found[each.measured.kind, each.measured.name][column].append(each)
    return found


def _tab(kind: Kind, summary: Summary, cells: _Cells, num_columns: int) -> Tab:
    numbered = [(n, layer) for n, layer in enumerate(summary.layers) if layer.kind == kind]
    names = [layer.name for _, layer in numbered]
    row_height = max(3, min(16, 720 // len(names)))
    apart = math.ceil(LABEL_HEIGHT / row_height)
    of_layers = [cells[kind, name] for name in names]
    return Tab(
        kind,
        [(number, _title(layer)) for number, layer in numbered],
        row_height,
        [
            ((index + 0.5) * row_height, _short(names[index]), names[index])
            for index in range(0, len(names), apart)
        ],
        [
            _map(HEADROOM, of_layers, num_columns, lambda each: each.headroom, min),
            _map(LOST, of_layers, num_columns, lambda each: each.share_lost, max),
        ],
        sum(_is_troubled(layer, summary) for _, layer in numbered),
    )


def _map(
    levels: Levels,
    rows: Iterable[Mapping[int, _Cell]],
    num_columns: int,
    value_of: Callable[[SampledTensor], float | None],
    worst: Callable[[Iterable[float]], float],
) -> HeatMap:
    lines: list[bytes] = []
    not_finite: list[tuple[float, float]] = []
    for number, row in enumerate(rows):
        line = bytearray([NO_VALUE]) * num_columns
        for column, cell in row.items():
            values = [value for each in cell if (value := value_of(each)) is not None]
            if any(each.measured.nan or each.measured.inf for each in cell):
                line[column] = NOT_FINITE
            elif values:
                line[column] = FIRST_LEVEL + levels.level(worst(values))
        lines.append(bytes(line))
        if NOT_FINITE in line:
            not_finite.append((line.index(NOT_FINITE) + 0.5, number + 0.5))
    image = base64.b64encode(png(lines, levels.colours)).decode()
    return HeatMap(levels, f"data:image/png;base64,{image}", not_finite)


# --- words ----------------------------------------------------------------------------------------


def _title(layer: Layer) -> str:
    pieces = [layer.name or "(the model)"]
    if layer.headroom is not None:
        pieces.append(f"least headroom {bits(layer.headroom)} at step {layer.headroom_step:,}")
    if layer.share_lost:
        worst = percent(layer.share_lost_worst)
        most = f"the most, {worst}, at step {layer.share_lost_step:,}"
        pieces.append(f"known underflow {percent(layer.share_lost)}, {most}")
    if layer.nan or layer.inf:
        pieces.append(f"{count(layer.nan)} NaN, {count(layer.inf)} inf")
    return "\n".join(pieces)


def _short(name: str) -> str:
    """Return the end of a path that fits into a label."""
    name = name or "(the model)"
    if len(name) <= LABEL_LETTERS:
        return name
    end = name[1 - LABEL_LETTERS :]
    return "…" + (end.partition(".")[2] or end)


# --- colours and their meaning --------------------------------------------------------------------


Colour: TypeAlias = tuple[int, int, int]

NO_VALUE, NOT_FINITE, FIRST_LEVEL = range(3)
"""Indices of a pixel without a value (transparent), with NaN or inf, and of the lowest level."""


_RAMP: tuple[Colour, ...] = (
    *((34, 48, 114), (52, 82, 121), (58, 117, 125), (84, 149, 126)),
    *((142, 174, 122), (207, 194, 113), (255, 217, 96)),
)
"""Colours at equal distances, from dark blue through green to bright yellow.

They lie on a line through OKLab (Björn Ottosson, "A perceptual color space for image processing",
2020): lightness grows evenly, and red-green colour-blind readers can tell blue from yellow.
"""


def ramp(share: float) -> Colour:
    """Return the colour of a share, from dark blue at 0 to bright yellow at 1."""
    place = share * (len(_RAMP) - 1)
    below = min(int(place), len(_RAMP) - 2)
    pairs = zip(_RAMP[below], _RAMP[below + 1], strict=True)
    red, green, blue = (round(low + (place - below) * (high - low)) for low, high in pairs)
    return red, green, blue


def palette(num_levels: int) -> list[Colour]:
    """Return the colours by index: no value, NaN or inf, and the levels of the ramp."""
    last = max(1, num_levels - 1)
    levels = [ramp(level / last) for level in range(num_levels)]
    return [(0, 0, 0), (255, 38, 98), *levels]


def css(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


class Levels(NamedTuple):
    """The meaning of the colours of a map."""

    title: str
    colours: list[Colour]
    labels: list[str]  # the tooltip of each level of the ramp
    ticks: list[Tick]  # of the colour bar
    level: Callable[[float], int]  # of a value

    @property
    def ramp(self) -> list[str]:
        """The colours of the levels as CSS."""
        return [css(colour) for colour in self.colours[FIRST_LEVEL:]]


_MOST_BITS = 20


def _headroom_levels() -> Levels:
    """Return levels of half a bit from 0 to 20 bits; bright means little headroom."""
    num = 2 * _MOST_BITS + 1
    colours = palette(num)
    ends = {0: "0 bits or less", num - 1: f"{_MOST_BITS} bits or more"}
    return Levels(
        "Headroom",
        colours[:FIRST_LEVEL] + colours[:1:-1],
        [ends.get(level, f"about {level / 2:g} bits") for level in range(num)],
        [(100 * (2 * at + 0.5) / num, f"{at}") for at in (0, 5, 10, 15, 20)],
        lambda headroom: min(num - 1, max(0, round(2 * headroom))),
    )


_LOWEST_DECADE, _LEVELS_PER_DECADE = -5, 6


def _lost_levels() -> Levels:
    """Return levels for none and for 0.001 % to 100 %, six per decade; bright is bad."""
    num = 2 - _LOWEST_DECADE * _LEVELS_PER_DECADE

    def level(share: float) -> int:
        if share == 0:
            return 0
        return max(1, num - 1 + round(math.log10(share) * _LEVELS_PER_DECADE))

    def share_of(level: int) -> float:
        return math.pow(10.0, (level - num + 1) / _LEVELS_PER_DECADE)

    shares = [10.0**decade for decade in range(_LOWEST_DECADE + 1, 1)]
    return Levels(
        "Underflow",
        palette(num),
        ["none", *(f"about {percent(share_of(each))}" for each in range(1, num))],
        [
            (50 / num, "0"),
            *((100 * (level(share) + 0.5) / num, f"{100 * share:g}") for share in shares),
        ],
        level,
    )


HEADROOM, LOST = _headroom_levels(), _lost_levels()


# --- pictures -------------------------------------------------------------------------------------


def png(rows: Sequence[bytes], colours: Sequence[Colour]) -> bytes:
    """Return a PNG file with one byte per pixel, an index into at most 256 colours.

    All rows have the same length, and the first colour is transparent.
    """
    width = len(rows[0])
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)
    lines = b"".join(b"\0" + row for row in rows)  # each line starts with its filter type: none
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", b"".join(map(bytes, colours))),
            _chunk(b"tRNS", b"\0"),
            _chunk(b"IDAT", zlib.compress(lines, 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    check = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)
