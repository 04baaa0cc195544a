"""The plot of a demo: one SVG file with the losses and the scale over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from halfstep._demo.results import Results
from halfstep._demo.train import Run

WIDTH = 860
LEFT, RIGHT = 64, 236
LOSS_TOP, LOSS_HEIGHT = 74, 300
SCALE_GAP, SCALE_HEIGHT = 64, 120
BOTTOM = 52


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels along one direction.

    Attributes:
        low: value at ``start``.
        high: value at ``end``.
        start: pixel of ``low``.
        end: pixel of ``high``; less than ``start`` for an axis that points up.
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value, rounded to what can be seen."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, about: int) -> list[tuple[float, str]]:
        """About that many round numbers on the axis: pixel and label."""
        step = round_step((self.high - self.low) / about)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(self.at(i * step), f"{i * step:g}") for i in range(first, last + 1)]


def round_step(roughly: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(roughly))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= roughly * 0.999)


@dataclass(frozen=True)
class Series:
    """One curve: the name of its precision and its SVG path."""

    name: str
    path: str


@dataclass(frozen=True)
class Panel:
    """One diagram: its curves and all that is written along its vertical axis.

    Attributes:
        title: what the axis shows.
        axis: the vertical axis.
        ticks: pixel and label.
        series: drawn in this order.
        is_power: labels are exponents of 2.
        skips: pixels x and y, and number, of each skipped step.
    """

    title: str
    axis: Axis
    ticks: list[tuple[float, str]]
    series: list[Series]
    is_power: bool = False
    skips: tuple[tuple[float, float, int], ...] = ()


def draw_chart(results: Results) -> str:
    """Return the SVG document: self-contained, for light and dark surroundings."""
    environment = Environment(
        loader=PackageLoader("halfstep._demo"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    x = Axis(1, max(2, results.settings.steps), LEFT, WIDTH - RIGHT)
    panels = [_loss_panel(results.runs, x), *_scale_panels(results.runs, x)]
    return environment.get_template("chart.svg.j2").render(
        width=WIDTH,
        height=panels[-1].axis.start + BOTTOM,
        left=LEFT,
        right=WIDTH - RIGHT,
        x_ticks=[(pixel, label) for pixel, label in x.ticks(8) if float(label).is_integer()],
        panels=panels,
        legend=[_legend_entry(run) for run in results.runs],
        legend_top=LOSS_TOP,
        subtitle=_subtitle(results),
    )


def _subtitle(results: Results) -> str:
    return (
        f"GPT with {results.num_parameters / 1e6:.2g} M parameters on {results.corpus.source}, "
        f"{results.settings.steps} steps, seed {results.settings.seed}; "
        f"{results.machine.device}; torch {results.machine.versions['torch']}"
    )


def _loss_panel(runs: Sequence[Run], x: Axis) -> Panel:
    shown = [loss for run in runs for loss in run.losses if math.isfinite(loss)] or [0.0, 1.0]
    low, high = min(shown), max(shown)
    step = round_step(max(high - low, 0.01) / 6)
    bottom, top = math.floor(low / step) * step, (math.floor(high / step) + 1) * step
    y = Axis(bottom, top, LOSS_TOP + LOSS_HEIGHT, LOSS_TOP)
    # The widest line first, fp32 last: curves that lie on each other can all be seen.
    series = [_series(run, run.losses, x, y) for run in reversed(runs)]
    return Panel("loss (nats per character)", y, y.ticks(6), series)


def _scale_panels(runs: Sequence[Run], x: Axis) -> list[Panel]:
    """The panel of the run that has a scale, if there is one."""
    return [_scale_panel(run, x) for run in runs if run.scales]


def _scale_panel(run: Run, x: Axis) -> Panel:
    top = LOSS_TOP + LOSS_HEIGHT + SCALE_GAP
    exponents = [math.log2(scale) for scale in run.scales]
    low, high = math.floor(min(exponents)) - 1, math.ceil(max(exponents)) + 1
    y = Axis(low, high, top + SCALE_HEIGHT, top)
    every = max(1, round((high - low) / 5))
    return Panel(
        "scale",
        y,
        [(y.at(exponent), str(exponent)) for exponent in range(low + 1, high, every)],
        [_series(run, exponents, x, y)],
        is_power=True,
        skips=tuple((x.at(step + 1), y.at(exponents[step]), step + 1) for step in run.skipped),
    )


def _series(run: Run, values: Sequence[float], x: Axis, y: Axis) -> Series:
    """The curve of one value after each step, interrupted where a value is inf or NaN."""
    pieces, pen_is_down = [], False
    for number, value in enumerate(values, start=1):
        if math.isfinite(value):
            pieces.append(f"{'L' if pen_is_down else 'M'}{x.at(number)} {y.at(value)}")
        pen_is_down = math.isfinite(value)
    return Series(run.precision.name, "".join(pieces))


def _legend_entry(run: Run) -> dict[str, object]:
    loss, share = run.training_loss, run.zero_share
    details = [
        "no step" if loss is None else f"loss {loss:.3f}",
        "" if share is None else f"{100 * share:.2g} % of gradients zero",
        "" if run.is_finished else f"stopped at step {len(run.losses)}",
    ]
    return {
        "name": run.precision.name,
        "title": run.precision.title,
        "details": [detail for detail in details if detail],
    }
