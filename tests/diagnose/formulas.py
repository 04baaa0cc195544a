"""Losses as people write them, which overflow or take log(0), each with an exact form.

They are the files of ``corpus/formulas``: a function of the outputs of a linear model and of
labels, after those that it calls. Lines above it say::

    # expect: the same loss, or another that falls with it, in a stable form
    # gain: the factor of the outputs at which the loss is not finite, if that is not 200
    # outputs: their number, if that is not 5; with one, the labels are 0 and 1, else classes

``judge`` pastes the cure that ``diagnose`` prints and trains with it: the exact loss falls, or not.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.diagnose.kinds.judged import run_file
from tests.dtype_errors.dtype_programs import pasted
from torch import Tensor, nn

import halfstep
from halfstep import Diagnosis

SOURCE = """\
import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.manual_seed(0)
x = torch.randn(16, 8)
labels = {labels}
model = nn.Linear(8, {outputs})


{functions}


def step():
    model.zero_grad()
    loss = {name}(model(x) * {gain}, labels)
    loss.backward()
    return loss
"""
STEPS = 40


@dataclass(frozen=True)
class Formula:
    """A program, and the exact loss as an expression of ``out``, with the gain, and ``y``."""

    source: str
    exact: str
    gain: float


def read(file: Path) -> Formula:
    head, _, functions = file.read_text().partition("\n\n")
    said = dict(re.findall("^# (\\w+): (.*)$", head, re.M))
    gain, outputs = float(said.get("gain", 200)), int(said.get("outputs", 5))
    source = SOURCE.format(
        labels="torch.randint(0, 2, (16,)).float()"
        if outputs == 1
        else "torch.randint(0, 5, (16,))",
        outputs=outputs,
        functions=functions.strip(),
        name=file.stem,
        gain=gain,
    )
    return Formula(source, said["expect"], gain)


FORMULAS = {
    file.stem: read(file) for file in sorted(Path(__file__).parent.glob("corpus/formulas/*.py"))
}


# --- exact losses ---------------------------------------------------------------------------------


def classes(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def binary(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out.squeeze(1), y)


def pairs(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    logits = (z @ z.T / 0.005).masked_fill(torch.eye(len(out)).bool(), -1e9)
    return F.cross_entropy(logits, (torch.arange(len(out)) - 8) % len(out))


def both_pairs(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    logits, each = z @ z.roll(8, 0).T / 0.005, torch.arange(len(z))
    return (F.cross_entropy(logits, each) + F.cross_entropy(logits.T, each)) / 2


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out.squeeze(1).sigmoid() - y).square().mean()


# --- judgement ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """Diagnosis of a formula, and the exact loss before and after training with the cure.

    ``after`` is NaN if there is nothing to paste, or if the training ended with inf or NaN.
    """

    found: Diagnosis
    before: float = math.nan
    after: float = math.nan

    @property
    def learns(self) -> bool:
        return self.after < 0.99 * self.before


def judge(name: str, folder: Path) -> Judged:
    """Diagnose a formula, paste the cure, and train with it."""
    source = FORMULAS[name].source
    found = halfstep.diagnose(run_file(source, folder / f"{name}.py")["step"])
    if found.cure is None or not found.cure.edits:
        return Judged(found)
    cured = run_file(pasted(source, found.cure.edits), folder / "cured.py")
    return Judged(found, *descend(FORMULAS[name], cured))


def descend(formula: Formula, names: dict[str, Any]) -> tuple[float, float]:
    """Take steps of 2 % of the norm of each parameter; return the exact loss before and after."""
    model: nn.Module = names["model"]
    before = _exact(formula, names)
    for _ in range(STEPS):
        loss = names["step"]()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        if not all(bool(each.isfinite().all()) for each in (loss, *gradients)):
            return before, math.nan
        with torch.no_grad():
            for each, gradient in zip(model.parameters(), gradients, strict=True):
                each -= 0.02 * each.norm() * gradient / gradient.norm().clamp_min(1e-6)
    return before, _exact(formula, names)


def _exact(formula: Formula, names: dict[str, Any]) -> float:
    with torch.no_grad():
        out = names["model"](names["x"]) * formula.gain
        return float(
            eval(formula.exact, {**globals(), **names}, {"out": out, "y": names["labels"]})
        )
