"""Every cure that can be pasted, pasted into the program that it was given for.

A program trains in this process and is recorded. A tool says what is wrong with it and what to
write; a case writes just that, and what was wrong must be gone. Edits of statements, which
``diagnose`` offers most often, are pasted in tests/diagnose/test_kinds.py; those for errors about
dtypes in tests/diagnose/test_dtype_errors.py.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.diagnose.kinds.judged import run as run_file
from tests.run.conftest import Run

import halfstep
from halfstep import Diagnosis
from halfstep._cli import main
from halfstep._common.text import Code, Sentence
from halfstep._record.read import read_run
from halfstep._report.summarize import summarize
from halfstep._report.text import sentences
from halfstep.errors import HalfstepWarning

LOOP = """
import torch
import halfstep
from torch import nn

torch.manual_seed(0)
x = torch.randn(16, 8)
model = {model}
{before}
optimizer = {optimizer}
scaler = {scaler}
losses = []
with halfstep.record(path, every=1):
    for n in range({steps}):
        with {autocast}:
            loss = {loss}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
"""

GIVEN = {
    "model": "nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))",
    "before": "",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=1e-3)",
    "scaler": 'halfstep.GradScaler("cpu", init_scale=1.0)',
    "autocast": 'halfstep.autocast("cpu", dtype=torch.float16)',
    "loss": "model(x).float().square().mean()",
    "steps": 12,
}


class Program(NamedTuple):
    """A program by its parts; ``paste`` puts a cure in the place of one."""

    parts: dict[str, Any]

    def paste(self, **parts: str) -> Program:
        return Program(self.parts | parts)

    def ran(self, folder: Path) -> Ran:
        folder.mkdir()
        file = folder / "train.py"
        source = LOOP.format(**self.parts)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", HalfstepWarning)
            names = run_file(source.replace("path,", f"{str(folder / 'out')!r},"), file)
        told = sentences(summarize(read_run(folder / "out")))
        return Ran(names, told, [str(each.message) for each in said])


class Ran(NamedTuple):
    names: dict[str, Any]
    told: tuple[Sentence, ...]
    warned: list[str]

    def problems(self) -> list[str]:
        return [each.text for each in self.told if each.severity in ("bad", "warning")]

    def sentence(self, words: str) -> Sentence:
        (only,) = [each for each in self.told if words in each.text]
        return only


def program(**parts: Any) -> Program:
    return Program(GIVEN | parts)


def given(call: str, to: str) -> str:
    """Return a call with the arguments of another one where the cure has ``...``."""
    return call.replace("...", to.partition("(")[2].rpartition(")")[0])


def with_policy(before: Program, call: str) -> Program:
    return before.paste(autocast=given(call, before.parts["autocast"]))


# --- the report -----------------------------------------------------------------------------------

BIG = "x = x.abs()\nfor each in {}: nn.init.constant_(model[each].weight, 3e4)"
NORMED = (
    "nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), "
    "nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))"
)


class Case(NamedTuple):
    """A program, words of the sentence on its problem, and the part that a cure goes into."""

    before: Program
    words: str
    cure: str  # how the code to paste begins
    paste: Callable[[Program, str], Program]


def into(part: str) -> Callable[[Program, str], Program]:
    def paste(now: Program, cure: str) -> Program:
        return now.paste(**{part: given(cure, GIVEN[part])})

    return paste


def above_the_loop(before: Program, cure: str) -> Program:
    return before.paste(optimizer=f"{before.parts['optimizer']}\noptimizer = {cure}")


OFF = 'halfstep.GradScaler("cpu", enabled=False)'
ISLAND = "halfstep.autocast(..., policy="
CASES = {
    "an output overflows": Case(
        program(model=NORMED, before=BIG.format([0])), "The loss became", ISLAND, into("autocast")
    ),
    "two outputs overflow": Case(
        program(model=NORMED, before=BIG.format([0, 2])),
        "The loss became",
        ISLAND,
        into("autocast"),
    ),
    "an output is close to overflow": Case(
        program(model=NORMED, before="nn.init.constant_(model[0].bias, 5e4)"),
        "of the largest value of fp16",
        ISLAND,
        into("autocast"),
    ),
    "the scale is too small": Case(
        program(
            before="small = torch.logspace(0, -3, 8)\nx *= small\nmodel[1].weight.data.copy_(small)",
            loss="model(x).float().square().mean() * 1e-2",
        ),
        "% of the gradient entries of `",
        "halfstep.GradScaler(init_scale=",
        into("scaler"),
    ),
    "updates are lost in bfloat16": Case(
        program(model=GIVEN["model"] + ".bfloat16()", before="x = x.bfloat16()"),
        "updates were lost to rounding in",
        "halfstep.master_weights(optimizer",
        above_the_loop,
    ),
    "updates are lost in float16": Case(
        program(
            model=GIVEN["model"] + ".half()",
            before="x = x.half()",
            optimizer="torch.optim.SGD(model.parameters(), lr=1e-4)",
            scaler=OFF,
        ),
        "updates were lost to rounding in",
        "halfstep.master_weights(optimizer",
        above_the_loop,
    ),
    "the optimizer has other weights": Case(
        program(
            optimizer="torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)", scaler=OFF
        ),
        "No weight moved",
        "model.parameters()",
        lambda before, cure: before.paste(optimizer=f"torch.optim.SGD({cure}, lr=1e-3)"),
    ),
    "a scaler in bfloat16": Case(
        program(
            autocast='halfstep.autocast("cpu", dtype=torch.bfloat16)',
            scaler='halfstep.GradScaler("cpu")',
        ),
        "needs no GradScaler",
        "enabled=False",
        lambda before, cure: before.paste(scaler=f'halfstep.GradScaler("cpu", {cure})'),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_report(case: Case, tmp_path: Path) -> None:
    now, ran = case.before, case.before.ran(tmp_path / "0")
    for number in range(1, 4):
        sentence = ran.sentence(case.words)
        texts = [part.text for part in sentence.parts if isinstance(part, Code)]
        (cure,) = [text for text in texts if text.startswith(case.cure)]
        now = case.paste(now, cure)
        ran = now.ran(tmp_path / str(number))
        if not (ran.problems() and "may overflow next" in sentence.text):
            break
    assert ran.problems() == [], sentence.text
    assert not [each.text for each in ran.told if re.search(case.words, each.text)]
    assert all(map(math.isfinite, ran.names["losses"]))
