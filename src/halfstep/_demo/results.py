"""Results of a demo, and their display as progress, table and plot."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Self

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

import halfstep
from halfstep._common.json import to_plain
from halfstep._common.machine import device_name
from halfstep._common.numbers import power
from halfstep._demo.corpus import Corpus
from halfstep._demo.train import DemoSettings, PrecisionRun
from halfstep._doctor.hardware import DTYPES, WORTH_IT, measure_speeds

MEASURE_SECONDS = 0.6
"""Total measuring time for all dtypes, in seconds."""


@dataclass(frozen=True)
class MeasuredMachine:
    """The machine and the software of a demo, with measured speeds."""

    device: str
    threads: int
    gflops: dict[str, float]  # in a matrix product, by name of the dtype
    ratios: dict[str, float]  # median ratios of the speed to that of fp32
    noise: str  # why the measurement is inconclusive, if it is
    versions: dict[str, str]
    system: str

    def sentence(self) -> str:
        """Return one sentence on the strengths of the machine, from measured numbers only."""
        rates = ", ".join(
            f"{rate:,.0f} in {name}" + ("" if name == "fp32" else f" ({self.ratios[name]:.2g} x)")
            for name, rate in self.gflops.items()
        )
        measured = f"This machine ({self.device}) does matrix products at {rates} GFLOP/s"
        return f"{measured}: {self._advice()}"

    def _advice(self) -> str:
        if self.noise:
            return f"{self.noise}."
        ratios = {name: self.ratios[name] for name in ("bf16", "fp16")}
        fast = [name for name, ratio in ratios.items() if ratio >= WORTH_IT]
        slow = [name for name, ratio in ratios.items() if ratio <= 1 / WORTH_IT]
        if len(fast) == 2:
            return "it is good at both bf16 and fp16."
        if not fast:
            return "neither bf16 nor fp16 makes it faster than fp32."
        other = "fp16" if fast == ["bf16"] else "bf16"
        than = "slower than fp32" if other in slow else "no faster than fp32"
        return f"it is good at {fast[0]}; {other} is {than}."


def measure_machine(device: str) -> MeasuredMachine:
    """Measure a few matrix products, in about a second, and look up names and versions."""
    speeds = measure_speeds(device, MEASURE_SECONDS, kinds=("matmul",))
    return MeasuredMachine(
        device=device_name(device),
        threads=torch.get_num_threads(),
        gflops={name: speeds.gflops["matmul"][name] for name in DTYPES},
        ratios={name: speeds.ratios["matmul"][name] for name in DTYPES},
        noise=speeds.noise,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "halfstep": halfstep.__version__,
        },
        system=platform.platform(),
    )


@dataclass(frozen=True)
class Results:
    """All runs of one call of ``halfstep demo``."""

    settings: DemoSettings
    corpus: Corpus
    machine: MeasuredMachine
    runs: list[PrecisionRun]  # the last one may have been interrupted
    num_parameters: int

    @property
    def baseline(self) -> PrecisionRun | None:
        """The finished fp32 run, to which the others are compared."""
        return next((r for r in self.runs if r.precision.name == "fp32" and r.is_finished), None)

    def summary(self, run: PrecisionRun) -> dict[str, Any]:
        """Return the numbers of the table for one run; missing ones are None.

        Losses are in nats per token, times in milliseconds, memory in bytes, fractions from 0 to 1.
        """
        base = self.baseline
        seconds = run.step_seconds
        return {
            "training_loss": run.training_loss,
            "training_loss_minus_fp32": _difference(run, base, run.training_loss, "training_loss"),
            "held_out_loss": run.held_out_loss,
            "held_out_loss_minus_fp32": _difference(run, base, run.held_out_loss, "held_out_loss"),
            "step_ms": None if seconds is None else seconds * 1e3,
            "step_time_ratio_to_fp32": (
                None
                if seconds is None or base is None or base.step_seconds is None
                else seconds / base.step_seconds
            ),
            "peak_memory_bytes": run.peak_memory,
            "steps_skipped": len(run.skipped) if run.precision.scaling else None,
            "final_scale": run.final_scale,
            "zero_gradient_share": run.zero_share,
        }

    def to_json(self) -> str:
        """Return everything as strict JSON: a non-finite loss becomes null."""
        settings = asdict(self.settings) | {"text": self.corpus.source}
        document = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": asdict(self.machine),
            "settings": settings,
            "model": {"parameters": self.num_parameters, "vocab": self.corpus.vocab},
            "characters": {
                "training": len(self.corpus.train),
                "held_out": len(self.corpus.held_out),
            },
            "runs": [self._run_as_dict(run) for run in self.runs],
        }
        return (
            json.dumps(to_plain(document, non_finite=lambda _: None), indent=1, allow_nan=False)
            + "\n"
        )

    def _run_as_dict(self, run: PrecisionRun) -> dict[str, Any]:
        return {
            "precision": run.precision.name,
            "finished": run.is_finished,
            "steps_done": len(run.losses),
            "summary": self.summary(run),
            "losses": run.losses,
            "scales": run.scales,
            "skipped": run.skipped,
            "step_ms": [seconds * 1e3 for seconds in run.seconds],
            "zero_gradient_shares": run.zero_shares,
        }


def _difference(
    run: PrecisionRun, base: PrecisionRun | None, value: float | None, name: str
) -> float | None:
    """Return the difference to the baseline; None for an interrupted run."""
    if base is None or value is None or not run.is_finished:
        return None
    return float(value - getattr(base, name))


REFRESH_SECONDS = 0.1
LINES_PER_RUN = 5


def describe(run: PrecisionRun) -> str:
    """Return the state of a run in words: loss, scale and time of its last step."""
    if not run.losses:
        return "starting"
    scale = f"  scale {power(run.scales[-1])}" if run.scales else ""
    return f"loss {run.losses[-1]:.3f}{scale}  {run.seconds[-1] * 1e3:.0f} ms/step"


class ProgressLines:
    """A progress view that prints a few lines for each run."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, run: PrecisionRun) -> None:
        """Print the title of a new run, or a progress line, about five times in a run."""
        done = len(run.losses)
        if not done:
            self._console.print(f"{run.precision.title}: {run.steps} steps", highlight=False)
        elif done % max(1, run.steps // LINES_PER_RUN) == 0 or done == run.steps:
            line = f"  step {done}/{run.steps}  {describe(run)}"
            self._console.print(line, highlight=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing: the lines stay."""


class ProgressBars(ProgressLines):
    """A progress view with one bar for each run, drawn between the steps.

    A drawing thread would slow down the steps that are measured.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=8),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[state]}", style="dim"),
            console=console,
            auto_refresh=False,
        )
        self._task = TaskID(0)
        self._drawn = 0.0

    def show(self, run: PrecisionRun) -> None:
        """Add a bar for a new run, otherwise move it; draw at most ten times a second."""
        done = len(run.losses)
        if not done:
            self._task = self._progress.add_task(run.precision.title, total=run.steps, state="")
        self._progress.update(self._task, completed=done, state=describe(run))
        if done in (0, run.steps) or time.perf_counter() - self._drawn > REFRESH_SECONDS:
            self._progress.refresh()
            self._drawn = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()


# --- the table ------------------------------------------------------------------------------------


NOTES = (
    "Losses in nats per character; the training loss is the mean over the last 20 steps, "
    "the held-out loss is computed in fp32 for all. Time: the median step after warm-up. "
    "Zero gradients: the share of the entries of all parameters' gradients that are exactly 0, "
    "mean over about 20 steps; those of fp32 are not underflow."
)


def build_table(results: Results) -> Table:
    """Make the table of the results, for rich to print."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for run in results.runs:
        table.add_column(_heading(run), justify="right", vertical="bottom")
    summaries = [results.summary(run) for run in results.runs]
    for label, key, show in ROWS:
        table.add_row(label, *(_cell(summary[key], show) for summary in summaries))
    return table


def _heading(run: PrecisionRun) -> str:
    heading = run.precision.title.replace(", ", "\n").replace(" + ", "\n+ ")
    return heading if run.is_finished else f"{heading}\nstopped at {len(run.losses)}"


def _cell(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _share(value: float) -> str:
    """Format a fraction with three digits, so that small values do not become zero."""
    return "0 %" if value == 0 else f"{100 * value:.3g} %"


ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("training loss", "training_loss", "{:.4f}".format),
    ("  minus fp32", "training_loss_minus_fp32", "{:+z.4f}".format),
    ("held-out loss", "held_out_loss", "{:.4f}".format),
    ("  minus fp32", "held_out_loss_minus_fp32", "{:+z.4f}".format),
    ("time per step", "step_ms", "{:.1f} ms".format),
    ("  ratio to fp32", "step_time_ratio_to_fp32", "{:.2f}".format),
    ("peak memory", "peak_memory_bytes", lambda size: f"{size / 2**20:.1f} MiB"),
    ("steps skipped", "steps_skipped", "{}".format),
    ("final scale", "final_scale", power),
    ("zero gradients", "zero_gradient_share", _share),
)
"""Label, key of :meth:`Results.summary`, and format of its value."""


# --- the plot -------------------------------------------------------------------------------------


WIDTH = 860
LEFT, RIGHT = 64, 236
LOSS_TOP, LOSS_HEIGHT = 74, 300
SCALE_GAP, SCALE_HEIGHT = 64, 120
BOTTOM = 52


@dataclass(frozen=True)
class PixelAxis:
    """An axis that maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of a value, rounded to visible precision."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, about: int) -> list[tuple[float, str]]:
        """Return about ``about`` round numbers on the axis: pixel and label."""
        step = round_step((self.high - self.low) / about)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(self.at(i * step), f"{i * step:g}") for i in range(first, last + 1)]


def round_step(roughly: float) -> float:
    """Return the next larger 1, 2 or 5 times a power of ten."""
    decade: float = 10.0 ** math.floor(math.log10(roughly))
    return next(factor * decade for factor in (1, 2, 5, 10) if factor * decade >= roughly * 0.999)


@dataclass(frozen=True)
class ChartSeries:
    """One curve: the name of its precision and its SVG path."""

    name: str
    path: str


@dataclass(frozen=True)
class ChartPanel:
    """One diagram: its curves in drawing order, and its vertical axis."""

    title: str
    axis: PixelAxis
    ticks: list[tuple[float, str]]  # pixel and label
    series: list[ChartSeries]
    is_power: bool = False  # labels are exponents of 2
    skips: tuple[tuple[float, float, int], ...] = ()  # pixels, and number, of each skipped step


def draw_chart(results: Results) -> str:
    """Return the SVG document: self-contained, for light and dark surroundings."""
    environment = Environment(
        loader=PackageLoader("halfstep._demo"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    x = PixelAxis(1, max(2, results.settings.steps), LEFT, WIDTH - RIGHT)
    scaled = [_scale_panel(run, x) for run in results.runs if run.scales]
    panels = [_loss_panel(results.runs, x), *scaled]
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


def _loss_panel(runs: Sequence[PrecisionRun], x: PixelAxis) -> ChartPanel:
    shown = [loss for run in runs for loss in run.losses if math.isfinite(loss)] or [0.0, 1.0]
    low, high = min(shown), max(shown)
    step = round_step(max(high - low, 0.01) / 6)
    bottom, top = math.floor(low / step) * step, (math.floor(high / step) + 1) * step
    y = PixelAxis(bottom, top, LOSS_TOP + LOSS_HEIGHT, LOSS_TOP)
    # The widest line first, fp32 last: curves stay visible where they overlap.
    series = [_series(run, run.losses, x, y) for run in reversed(runs)]
    return ChartPanel("loss (nats per character)", y, y.ticks(6), series)


def _scale_panel(run: PrecisionRun, x: PixelAxis) -> ChartPanel:
    top = LOSS_TOP + LOSS_HEIGHT + SCALE_GAP
    exponents = [math.log2(scale) for scale in run.scales]
    low, high = math.floor(min(exponents)) - 1, math.ceil(max(exponents)) + 1
    y = PixelAxis(low, high, top + SCALE_HEIGHT, top)
    every = max(1, round((high - low) / 5))
    return ChartPanel(
        "scale",
        y,
        [(y.at(exponent), str(exponent)) for exponent in range(low + 1, high, every)],
        [_series(run, exponents, x, y)],
        is_power=True,
        skips=tuple((x.at(step + 1), y.at(exponents[step]), step + 1) for step in run.skipped),
    )


def _series(run: PrecisionRun, values: Sequence[float], x: PixelAxis, y: PixelAxis) -> ChartSeries:
    """Return the curve of one value after each step, interrupted at inf and NaN."""
    pieces, pen_is_down = [], False
    for number, value in enumerate(values, start=1):
        if math.isfinite(value):
            pieces.append(f"{'L' if pen_is_down else 'M'}{x.at(number)} {y.at(value)}")
        pen_is_down = math.isfinite(value)
    return ChartSeries(run.precision.name, "".join(pieces))


def _legend_entry(run: PrecisionRun) -> dict[str, object]:
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
