"""The examples of frameworks, run as a user runs them, alone and by `halfstep run`."""

import os
import subprocess
import sys
from pathlib import Path

from halfstep._record.read import read_run
from halfstep._record.run import Run

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"


def run_example(name: str, folder: Path, *arguments: str) -> tuple[str, Run]:
    """Run an example alone and by `halfstep run`; return what it prints, and its record.

    Both train the same; what the example records of itself, the runner records too.
    """
    words = [EXAMPLES / f"{name}.py", *arguments, "--record"]
    by_runner = ["-m", "halfstep", "run", "-q", "-o", folder / "runner"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *before, *words, folder / record],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for before, record in (([], "alone"), (by_runner, "under"))
    ]
    (alone, error_alone), (under, error_under) = [each.communicate() for each in processes]
    assert [each.returncode for each in processes] == [0, 0], error_alone + error_under
    assert share_right(under) == share_right(alone)
    run = read_run(folder / "alone")
    assert steps_of(run) == steps_of(read_run(folder / "under"))
    assert steps_of(run) == steps_of(read_run(folder / "runner"))
    return alone, run


def steps_of(run: Run) -> list[str]:
    """Return what became of each step, as text, in which NaN equals NaN."""
    names = ("step", "optimizer", "taken", "reason", "scale", "scale_after", "loss", "norm")
    return [str({name: getattr(step, name) for name in names}) for step in run.steps]


def share_right(printed: str) -> float:
    """Return the share of digits that a trained model names, the last line of each example."""
    last = printed.splitlines()[-1]
    assert last.startswith("result: ")
    return float(last.split()[1].removesuffix("%")) / 100
