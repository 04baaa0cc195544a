"""The whole demo: measure the machine, train, show and write the results."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from halfstep._demo.corpus import Corpus
from halfstep._demo.gpt import SIZES
from halfstep._demo.results import (
    NOTES,
    ProgressBars,
    ProgressLines,
    Results,
    build_table,
    draw_chart,
    measure_machine,
)
from halfstep._demo.train import DemoSettings, PrecisionRun, new_model, train
from halfstep._record.files import file_of
from halfstep._record.read import read_run
from halfstep._record.record import record
from halfstep._report.page import render
from halfstep._report.summarize import summarize
from halfstep.errors import DemoError

RECORD = "run"
NUM_SAMPLES = 10
"""Number of steps in which tensors are sampled for the record."""
NARROWEST = 96
"""Width of the table if the output is a file or a pipe."""


def run_demo(settings: DemoSettings, output: Path, console: Console | None = None) -> bool:
    """Train in each precision, then print the table and write the plot and the numbers.

    Ctrl-C (``KeyboardInterrupt``) ends the training; the results so far are shown and written.

    Args:
        settings: the settings.
        output: directory for ``losses.svg``, ``results.json``, and in ``run`` the record of the
            last precision with its report; created if it does not exist.
        console: where to print; by default standard output.

    Returns:
        False if it was interrupted.

    Raises:
        DemoError: The text cannot be used, or ``output`` cannot be written.
    """
    console = console or _console()
    corpus = Corpus.load(settings.text, SIZES[settings.size][0])
    _prepare(output)
    num_parameters = new_model(corpus, settings).num_parameters()
    machine = measure_machine(settings.device)
    _say(
        console,
        f"Training a GPT with {num_parameters:,} parameters on {corpus.source} "
        f"({len(corpus.train):,} characters, {len(corpus.held_out):,} held out).\n",
    )
    results = Results(settings, corpus, machine, [], num_parameters)
    was_finished = _train_all(results, output / RECORD, console)
    _show(results, output, console)
    return was_finished


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    return console


def _prepare(output: Path) -> None:
    """Check before training that the results can be written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in ("losses.svg", "results.json"):
            with (output / name).open("a") as file:
                is_new = file.tell() == 0
            if is_new:
                (output / name).unlink()
        file_of(output / RECORD, 0).unlink(missing_ok=True)  # of an earlier demo
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DemoError(
            f"cannot write to --output {str(output)!r}: {reason}; name another directory"
        ) from None


def _train_all(results: Results, folder: Path, console: Console) -> bool:
    """Train in each precision in turn and record the last; return whether all finished."""
    settings = results.settings
    every = max(1, settings.steps // NUM_SAMPLES)
    try:
        with (ProgressBars if console.is_terminal else ProgressLines)(console) as view:
            for precision in settings.ordered_precisions:
                run = PrecisionRun(precision, settings.steps)
                results.runs.append(run)
                view.show(run)
                is_last = precision is settings.ordered_precisions[-1]
                around = record(folder, every=every) if is_last else nullcontext()
                train(run, results.corpus, settings, view.show, around)
    except KeyboardInterrupt:
        _say(console, "\nInterrupted: these are the results so far.")
        return False
    return True


def _show(results: Results, output: Path, console: Console) -> None:
    console.print(build_table(results))
    console.print(NOTES, style="dim", highlight=False)
    _say(console, f"\n{results.machine.sentence()}")
    chart, numbers = output / "losses.svg", output / "results.json"
    numbers.write_text(results.to_json(), encoding="utf-8")
    chart.write_text(draw_chart(results), encoding="utf-8")
    _say(console, f"\nPlot: {chart}\nNumbers: {numbers}", soft_wrap=True)
    folder = output / RECORD
    if file_of(folder, 0).exists():
        recorded = read_run(folder)
        report = folder / "report.html"
        report.write_text(render(summarize(recorded), recorded), encoding="utf-8")
        name = results.runs[-1].precision.title
        _say(console, f"Report of the run in {name}: {report}", soft_wrap=True)


def _say(console: Console, text: str, soft_wrap: bool = False) -> None:
    """Print text unchanged: brackets in a file name are not markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=soft_wrap)
