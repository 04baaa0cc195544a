"""The curves of the page: loss, scale, gradient norm and lost updates over the steps.

The page draws a fixed number of columns, however many steps a run has. Each column keeps its first,
last, smallest and largest value, NaN and inf, and all skips.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from halfstep._common import numbers
from halfstep._tools.record.run import Step
from halfstep._tools.report.summarize import RECENT, Track, tracks_of
from halfstep._tools.report.summary import NOTABLE
from halfstep._tools.trace.rows import grouped

UNITS = 1000  # side length of a plot in its own units; the page scales it

Tick: TypeAlias = tuple[float, str]  # position in percent of the side, and label

Key: TypeAlias = Literal["loss", "scale", "norm", "share_lost_updates"]
TITLES: dict[Key, str] = {
    "loss": "Loss",
    "scale": "Scale",
    "norm": "Gradient norm",
    "share_lost_updates": "Lost updates",
}

SHAPES = {"overflow": "triangle", "loss": "circle", "non-finite down to min_scale": "square"}
"""The markers of skips by reason; other reasons have a diamond."""


class Mark(NamedTuple):
    """An event on the step axis; ``x`` is in percent."""

    x: float
    title: str


class Lane(NamedTuple):
    """The skips of one track with the same reason; ``name`` is empty if there is only one track."""

    name: str
    reason: str
    shape: str
    num: int
    marks: list[Mark]


class Path(NamedTuple):
    """A curve in units of the plot; dots if most steps have no value, as only samples do."""

    track: int  # its index
    kind: Literal["line", "raw", "dots"]  # "raw" is below a smooth one
    path: str


class Panel(NamedTuple):
    """One diagram."""

    key: Key
    title: str
    axis: str  # the kind of vertical axis, in words
    ticks: list[Tick]  # of the vertical axis
    paths: list[Path]
    mean_of: int | None  # the steps that smooth curves average over; None without such curves
    nan: list[Mark]
    inf: list[Mark]


class Curves(NamedTuple):
    """All diagrams over the steps, with a common step axis."""

    names: list[str]  # of the tracks; empty if there is only one
    ticks: list[Tick]  # of the step axis
    panels: list[Panel]
    lanes: list[Lane]
    skips: str  # the path of thin lines at the skips, through all panels
    data: dict[str, Any]  # of the tooltip


def curves(runs: Mapping[str, Sequence[Step]]) -> Curves | None:
    """Return the diagrams of the steps of named runs; None without steps."""
    tracks = [track for name, steps in runs.items() if steps for track in tracks_of(name, steps)]
    if not tracks:
        return None
    first = min(track.steps[0].step for track in tracks)
    last = max(track.steps[-1].step for track in tracks)
    x = Axis(first, max(last, first + 1))
    lanes = _lanes(tracks, x)
    places = sorted({round(UNITS / 100 * mark.x) for lane in lanes for mark in lane.marks})
    panels = [_panel(key, tracks, x) for key in TITLES]
    return Curves(
        names=[track.name for track in tracks] if len(tracks) > 1 else [],
        ticks=x.ticks(round_numbers(x.low, x.high, 5, smallest=1)),
        panels=[panel for panel in panels if panel is not None],
        lanes=lanes,
        skips="".join(f"M{place} 0V{UNITS}" for place in places),
        data={
            "first": x.low,
            "last": x.high,
            "titles": TITLES,
            "tracks": [_points(track, x) for track in tracks],
        },
    )


def _lanes(tracks: Sequence[Track], x: Axis) -> list[Lane]:
    lanes = []
    for track in tracks:
        name = track.name if len(tracks) > 1 else ""
        skipped = [step for step in track.steps if not step.taken]
        for reason, steps in grouped(skipped, lambda step: step.reason or "unknown").items():
            shape = SHAPES.get(reason, "diamond")
            lanes.append(
                Lane(name, reason, shape, len(steps), marks(steps, x, f"skipped: {reason}"))
            )
    return lanes


# --- one diagram ----------------------------------------------------------------------------------


class _Vertical(NamedTuple):
    """A linear axis, or a logarithmic one with a base, and the format of its labels."""

    axis: Axis
    base: float | None
    label: Callable[[float], str]

    def units(self, value: float | None) -> int | None:
        """Return the position of a value; None if it cannot be drawn."""
        if value is None or not math.isfinite(value) or (self.base and value <= 0):
            return None
        return self.axis.units(_logarithm(value, self.base) if self.base else value)

    def ticks(self) -> list[Tick]:
        low, high = self.axis.low, self.axis.high
        if self.base is None:
            return self.axis.ticks(round_numbers(low, high, 4), self.label)
        if self.base == 10 and high - low < 2.5:
            exponents = range(math.floor(low), math.ceil(high) + 1)
            values = [math.log10(digit * 10.0**e) for e in exponents for digit in (1, 2, 5)]
        else:
            apart = next(2**n for n in itertools.count() if (high - low) / 2**n <= 5)
            exponents = range(math.ceil(low), math.floor(high) + 1)
            values = [float(e) for e in exponents if e % apart == 0]
        base = self.base
        return self.axis.ticks(values, lambda value: self.label(base**value))


def _vertical(key: Key, finite: Sequence[float]) -> _Vertical:
    """Return the vertical axis.

    It has powers of two for the scale, goes from 0 to 1 for a share, and is logarithmic for a wide
    range of other values.
    """
    if key == "share_lost_updates":
        return _Vertical(Axis(0.0, 1.05, points_up=True), None, numbers.percent)
    positive = [value for value in finite if value > 0]
    spans_a_lot = positive and positive == list(finite) and max(finite) > 50 * min(finite)
    if key == "scale" or spans_a_lot:
        base, label = (2.0, numbers.power) if key == "scale" else (10.0, "{:.3g}".format)
        shown, margin = [_logarithm(value, base) for value in positive] or [0.0], 0.5 / base
    else:
        base, label, shown = None, "{:.6g}".format, list(finite) or [0.0]
        margin = 0.1 * abs(shown[0]) or 1.0
    low, high = min(shown), max(shown)
    margin = max(0.06 * (high - low), 0.0 if high > low and base is None else margin)
    return _Vertical(Axis(low - margin, high + margin, points_up=True), base, label)


def _logarithm(value: float, base: float) -> float:
    return math.log2(value) if base == 2 else math.log10(value)


def _panel(key: Key, tracks: Sequence[Track], x: Axis) -> Panel | None:
    pairs = [(step, getattr(step, key)) for track in tracks for step in track.steps]
    seen = [(step, value) for step, value in pairs if value is not None]
    if not seen or (key == "share_lost_updates" and max(v for _, v in seen) < NOTABLE):
        return None
    y = _vertical(key, [value for _, value in seen if math.isfinite(value)])
    title = TITLES[key]
    nan = [step for step, value in seen if math.isnan(value)]
    inf = [step for step, value in seen if math.isinf(value)]
    return Panel(
        key,
        title,
        {None: "", 2.0: "powers of two", 10.0: "logarithmic"}[y.base],
        y.ticks(),
        [path for place, track in enumerate(tracks) for path in _paths(key, place, track, x, y)],
        _mean_of(tracks) if key == "loss" else None,
        marks(nan, x, f"{title.lower()} is NaN"),
        marks(inf, x, f"{title.lower()} is inf"),
    )


def _paths(key: Key, place: int, track: Track, x: Axis, y: _Vertical) -> Iterator[Path]:
    values = [getattr(step, key) for step in track.steps]
    num_known = sum(value is not None for value in values)
    if key == "scale":
        yield Path(place, "line", line(stairs(_points_of(values, track, x, y))))
    elif 2 * num_known < len(values):
        apart = ([point, None] for point in _points_of(values, track, x, y))
        yield Path(place, "dots", line(itertools.chain.from_iterable(apart)))
    else:
        mean_of = _mean_of([track]) if key == "loss" else None
        yield Path(place, "raw" if mean_of else "line", line(_points_of(values, track, x, y)))
        if mean_of:
            yield Path(place, "line", line(_points_of(smoothed(values, mean_of), track, x, y)))


def _points_of(
    values: Sequence[float | None], track: Track, x: Axis, y: _Vertical
) -> Iterator[tuple[int, int] | None]:
    for index in kept(_columns(track, x), values):
        height = y.units(values[index])
        yield None if height is None else (x.units(track.steps[index].step), height)


def _mean_of(tracks: Sequence[Track]) -> int | None:
    """Return the number of steps that a smooth loss averages over; None if the run is too short."""
    num = max(len(track.steps) for track in tracks)
    return max(RECENT, num // 50) if num > 3 * RECENT else None


def smoothed(values: Sequence[float | None], mean_of: int) -> list[float | None]:
    """Return running means over the last finite values; other values are unchanged."""
    total, recent = 0.0, deque[float]()
    found: list[float | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            found.append(value)
            continue
        recent.append(value)
        total += value
        if len(recent) > mean_of:
            total -= recent.popleft()
        found.append(total / len(recent))
    return found


# --- data of the tooltip --------------------------------------------------------------------------


def _points(track: Track, x: Axis) -> dict[str, Any]:
    """Return the drawn steps with all their values."""
    columns = _columns(track, x)
    values = {key: [getattr(step, key) for step in track.steps] for key in TITLES}
    skips = [None if step.taken else 0.0 for step in track.steps]
    chosen = sorted({i for column in (*values.values(), skips) for i in kept(columns, column)})
    steps = [track.steps[i] for i in chosen]
    return {
        "name": track.name,
        "step": [step.step for step in steps],
        "reason": [None if step.taken else step.reason or "unknown" for step in steps],
        **{key: [_short(key, of_track[i]) for i in chosen] for key, of_track in values.items()},
    }


def _short(key: Key, value: float | None) -> float | None:
    """Return a value rounded to the digits that are shown; a scale stays exact."""
    return value if value is None or key == "scale" else float(f"{value:.4g}")


# --- steps in columns -----------------------------------------------------------------------------


COLUMNS = 500


def _column(step: Step, x: Axis) -> int:
    return min(COLUMNS - 1, int(COLUMNS * x.share(step.step)))


def _columns(track: Track, x: Axis) -> list[int]:
    return [_column(step, x) for step in track.steps]


def kept(columns: Sequence[int], values: Sequence[float | None]) -> list[int]:
    """Return the sorted indices of the values to draw, given the column of each value."""
    by_column = itertools.groupby(range(len(columns)), lambda index: columns[index])
    return sorted(index for _, alike in by_column for index in _kept_of_column(alike, values))


def _kept_of_column(indices: Iterable[int], values: Sequence[float | None]) -> set[int]:
    known = [(value, i) for i in indices if (value := values[i]) is not None]
    finite = [(value, i) for value, i in known if math.isfinite(value)]
    others = {str(value): i for value, i in reversed(known) if not math.isfinite(value)}
    chosen = set(others.values())
    if finite:
        chosen |= {min(finite)[1], max(finite)[1], finite[0][1], finite[-1][1]}
    return chosen


def marks(steps: Sequence[Step], x: Axis, what: str) -> list[Mark]:
    """Return one mark for each column that contains any of the steps."""
    steps = sorted(steps, key=lambda step: step.step)
    by_column = grouped(steps, lambda step: _column(step, x))
    return [Mark(x.percent(alike[0].step), _title(alike, what)) for alike in by_column.values()]


def _title(steps: Sequence[Step], what: str) -> str:
    first, last = steps[0].step, steps[-1].step
    if len(steps) == 1:
        return f"step {first:,}: {what}"
    return f"{len(steps):,} steps from {first:,} to {last:,}: {what}"


# --- axes and paths -------------------------------------------------------------------------------


class Axis(NamedTuple):
    """A map from values to positions along a side of a plot."""

    low: float  # at the left or lower end
    high: float
    points_up: bool = False  # a vertical axis: SVG counts from the top

    def share(self, value: float) -> float:
        """Return the position of a value along the side, 0 to 1; values outside are clamped."""
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return 1 - share if self.points_up else share

    def units(self, value: float) -> int:
        return round(UNITS * self.share(value))

    def percent(self, value: float) -> float:
        return round(100 * self.share(value), 2)

    def ticks(
        self, values: Iterable[float], label: Callable[[float], str] = "{:,g}".format
    ) -> list[Tick]:
        """Return ticks for the values that are on the axis."""
        inside = (value for value in values if self.low <= value <= self.high)
        return [(self.percent(value), label(value)) for value in inside]


def round_numbers(low: float, high: float, about: int, smallest: float = 0.0) -> list[float]:
    """Return about ``about`` round numbers in a range, 1, 2 or 5 times a power of ten apart."""
    if high <= low:
        return [low]
    roughly = max((high - low) / about, smallest)
    power = 10.0 ** math.floor(math.log10(roughly))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= roughly * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def stairs(points: Iterable[tuple[int, int] | None]) -> Iterator[tuple[int, int] | None]:
    """Yield the points of a step curve, which keeps its height up to the next point."""
    for before, point in itertools.pairwise([None, *points]):
        if before is not None and point is not None:
            yield point[0], before[1]
        yield point


def line(points: Iterable[tuple[int, int] | None]) -> str:
    """Return the path through points in units; None interrupts it.

    Coordinates are relative, to save bytes. A single point becomes a line of length zero, which
    round caps draw as a dot.
    """
    pieces: list[str] = []
    before: tuple[int, int] | None = None
    for point in points:
        if point is None:
            before = None
        elif before is None:
            pieces.append(f"M{point[0]} {point[1]}l0 0")
            before = point
        elif point != before:
            pieces.append(f" {point[0] - before[0]} {point[1] - before[1]}")
            before = point
    return "".join(pieces).replace(" -", "-")
