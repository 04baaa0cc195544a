"""Examples of integrations, run as a user runs them, and loops that equal them."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import forked
from tests.training import labelled, mlp
from torch import Tensor, nn

import halfstep
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import Run

FOLDER = Path(__file__).parents[2] / "examples" / "integrations"
IMPORT_WARNINGS = "ignore::DeprecationWarning"
"""Of torch.jit.script and pandas, set off by the frameworks when they are imported."""


def needs(framework: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests that need a framework, which in turn needs torchvision."""
    reason = (
        f"{framework} is not installed; it needs torchvision: pip install 'halfstep[{framework}]'"
    )
    is_missing = find_spec(framework) is None
    return [
        pytest.mark.skipif(is_missing, reason=reason),
        pytest.mark.filterwarnings(IMPORT_WARNINGS),
    ]


def load(name: str) -> dict[str, Any]:
    """Return what an example defines."""
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def printed_by(name: str, arguments: str, runner: Path | None = None, **env: str) -> str:
    """Run an example, by itself or by `halfstep run` into a folder; return what it prints."""
    by_runner = [] if runner is None else ["-m", "halfstep", "run", "-q", "-o", runner]
    command = [*by_runner, FOLDER / f"{name}.py", *arguments.split()]
    done = forked.python(*command, cwd=Path.cwd(), environ=env, warnings="ignore")
    assert done.code == 0, done.err
    return done.out


def recorded(name: str, arguments: str, folder: Path, **env: str) -> Run:
    """Run an example by `halfstep run` and return its record."""
    printed_by(name, arguments, folder, **env)
    return read_run(folder)


def recorded_by_itself(name: str, arguments: str, folder: Path) -> tuple[str, Run]:
    """Run an example that records itself, and again by `halfstep run`, which records the same.

    Returns:
        What it prints, and its record.
    """
    script = [FOLDER / f"{name}.py", *arguments.split(), "--record"]
    runner = ["-m", "halfstep", "run", "-q", "-o", folder / "runner"]
    calls = [*script, folder / "alone"], [*runner, *script, folder / "under"]
    alone, under = forked.one_after_another(*calls, cwd=folder, warnings="ignore")
    assert share_right(under) == share_right(alone)
    record = read_run(folder / "alone")
    for other in ("under", "runner"):
        assert steps_of(record) == steps_of(read_run(folder / other))
    return alone, record


def steps_of(run: Run) -> list[str]:
    """Return what became of each step, as text, in which NaN equals NaN."""
    names = ("step", "optimizer", "taken", "reason", "scale", "scale_after", "loss", "norm")
    return [str({name: getattr(step, name) for name in names}) for step in run.steps]


def share_right(printed: str) -> float:
    """Return the share of digits that a trained model names, the last line of an example."""
    last = printed.splitlines()[-1]
    assert last.startswith("result: ")
    return float(last.split()[1].removesuffix("%")) / 100


@dataclass
class Trained:
    """What a loop by hand has done: the loss of each step, and the numbers of those skipped."""

    losses: list[float]
    skipped: list[int]


def train(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    max_norm: float | None = None,
    scaler: halfstep.GradScaler | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Trained:
    """Train in float16 by a loop that is written out."""
    scaler = scaler or halfstep.GradScaler()
    trained = Trained([], [])
    for step, (x, y) in enumerate(batches, 1):
        optimizer.zero_grad()
        with halfstep.autocast(x.device.type, torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        trained.losses.append(loss.item())
        if scaler.outcome(optimizer).skipped:
            trained.skipped.append(step)
    return trained


def assert_printed(printed: str, trained: Trained) -> None:
    """Assert that an example has printed the losses and skips of a loop by hand, and learnt."""
    losses = {int(step): loss for step, loss in re.findall(r"step +(\d+) +loss (\S+)", printed)}
    assert len(losses) > 5
    assert losses == {step: f"{trained.losses[step - 1]:.6f}" for step in losses}
    skipped = [int(step) for step in re.findall(r"step +(\d+)  skipped", printed)]
    assert skipped == trained.skipped
    assert 20 in skipped
    taken = len(trained.losses) - len(skipped)
    assert f"{taken} steps taken, {len(skipped)} skipped" in printed
    assert trained.losses[-1] < trained.losses[0] / 2


def assert_recorded(run: Run, trained: Trained) -> None:
    """Assert that a record has the steps, losses and skips of a loop by hand."""
    # A record keeps a loss as a float32, and one that is inf or NaN as it is.
    assert [repr(step.loss) for step in run.steps] == [repr(loss) for loss in trained.losses]
    assert [step.step for step in run.steps if not step.taken] == trained.skipped
    assert run.error is None


def small() -> nn.Sequential:
    return mlp(8, 16, 4, between=nn.GELU)


def large_batches(num: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Return batches for ``small``, of numbers that are not small."""
    return [(4 * x, y) for x, y in labelled(num, 32, 8, 4)]


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_close(model: nn.Module, other: nn.Module) -> None:
    """Assert that two models have the same weights up to rounding."""
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-5, atol=1e-7)
