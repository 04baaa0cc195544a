"""Every cure that can be pasted, pasted into the program that it was given for.

A program trains in this process and is recorded. A tool says what is wrong with it and what to
write; a case writes just that, and what was wrong must be gone. Edits of statements, which
``diagnose`` offers most often, are pasted in tests/diagnose/test_kinds.py; those for errors about
dtypes in tests/dtype_errors/test_dtype_errors.py.
"""

from __future__ import annotations

import math
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests import forked
from tests.diagnose.kinds.judged import run_file

import halfstep
from halfstep import Diagnosis
from halfstep._common.text import Code, Sentence
from halfstep._tools.record.read import read_run
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.text import sentences
from halfstep.errors import HalfstepWarning

CORPUS = Path(__file__).parent / "corpus" / "pasted"
LOOP = (CORPUS / "loop.py").read_text()

GIVEN = {
    "model": "nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))",
    "before": "",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=1e-3)",
    "scaler": 'halfstep.GradScaler("cpu", init_scale=1.0)',
    "autocast": 'halfstep.autocast("cpu", dtype=torch.float16)',
    "loss": "model(x).float().square().mean()",
    "record": "halfstep.record(path, every=1)",
    "around": "nullcontext()",
    "step": "scaler.step(optimizer); scaler.update()",
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
            names = run_file(source.replace("record(path", f"record({str(folder / 'out')!r}"), file)
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
    left: str = "nothing"  # words of problems that the cure leaves


def into(part: str) -> Callable[[Program, str], Program]:
    def paste(now: Program, cure: str) -> Program:
        return now.paste(**{part: given(cure, GIVEN[part])})

    return paste


def above_the_loop(before: Program, cure: str) -> Program:
    return before.paste(optimizer=f"{before.parts['optimizer']}\noptimizer = {cure}")


BF16 = 'halfstep.autocast("cpu", dtype=torch.bfloat16)'
BATCH_NORM = "nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))"
ONE_BAD_BATCH = "model(x * (torch.inf if n == 5 else 1)).float().square().mean()"
LESS = "less = torch.logspace(0, -3, 64)"
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
            model="nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))",
            before=f"{LESS}; x *= less[::8]; model[1].weight.data.copy_(less)",
            loss="model(x).float().square().mean() * 1e-2",
        ),
        "% of the gradient entries of `",
        "halfstep.GradScaler(init_scale=",
        into("scaler"),
    ),
    "updates are lost in bfloat16": Case(
        program(model=GIVEN["model"] + ".bfloat16()", before="x = x.bfloat16()"),
        "of the measured updates",
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
        "of the measured updates",
        "halfstep.master_weights(optimizer",
        above_the_loop,
    ),
    "the optimizer has other weights": Case(
        program(optimizer="torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)", scaler=OFF),
        "No weight moved",
        "model.parameters()",
        lambda before, cure: before.paste(optimizer=f"torch.optim.SGD({cure}, lr=1e-3)"),
    ),
    "no model is called": Case(
        program(loss="F.linear(x, model[0].weight).square().mean()", scaler=OFF),
        "No tensors were sampled",
        "halfstep.record(path, model=model)",
        lambda now, cure: now.paste(record=cure),
    ),
    "samples are off": Case(
        program(record="halfstep.record(path, every=0)"),
        "No tensors were sampled",
        "every=10",
        lambda now, cure: now.paste(record=f"halfstep.record(path, {cure})"),
    ),
    "the scale climbs too high": Case(
        program(
            scaler='halfstep.GradScaler("cpu", init_scale=2.0**14, growth_interval=1)',
            loss="model(x).float().square().mean() * 100",
            steps=60,
        ),
        "steps were skipped",
        "halfstep.GradScaler(",
        lambda now, cure: now.paste(scaler=cure.replace(")", ", growth_interval=1)")),
    ),
    "the first scale is much too high": Case(
        program(scaler='halfstep.GradScaler("cpu", init_scale=2.0**60)', steps=30),
        "steps were skipped",
        "halfstep.GradScaler(",
        lambda now, cure: now.paste(scaler=cure),
    ),
    "skips leave buffers bad, with a scaler": Case(
        program(model=BATCH_NORM, loss=ONE_BAD_BATCH),
        "of the model became inf or NaN",
        "GradScaler(module=model)",
        lambda now, cure: now.paste(scaler=f"halfstep.{cure}"),
        left="[sS]tep",
    ),
    "skips leave buffers bad, with a guard": Case(
        program(model=BATCH_NORM, loss=ONE_BAD_BATCH),
        "of the model became inf or NaN",
        "guard(optimizer, module=model)",
        lambda now, cure: now.paste(
            scaler=f"{OFF}\nguard = halfstep.{cure}", autocast=BF16, step="optimizer.step()"
        ),
        left="[sS]tep",
    ),
    "steps are taken past the scaler": Case(
        program(step="optimizer.step()", scaler='halfstep.GradScaler("cpu", init_scale=8.0)'),
        "Steps were taken past the scaler",
        "scaler.step(optimizer) in place of optimizer.step(), then scaler.update()",
        lambda now, cure: now.paste(step="; ".join(re.findall(r"scaler\.\w+\(\w*\)", cure))),
    ),
    "a scaler of PyTorch's": Case(
        program(scaler='torch.amp.GradScaler("cpu", init_scale=8.0)'),
        "torch.amp.GradScaler scales the losses",
        "halfstep.GradScaler",
        lambda now, cure: now.paste(
            scaler=now.parts["scaler"].replace("torch.amp.GradScaler", cure)
        ),
    ),
    "a scaler in bfloat16": Case(
        program(autocast=BF16, scaler='halfstep.GradScaler("cpu")'),
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
        codes = [part.text for part in sentence.parts if isinstance(part, Code)]
        texts = [code for code in codes if code.startswith(case.cure)]
        assert texts or case.cure in sentence.text, sentence.text  # notes have no markup
        now = case.paste(now, texts[0] if texts else case.cure)
        ran = now.ran(tmp_path / str(number))
        if not (ran.problems() and "had inf: keep" in sentence.text):
            break
    assert [text for text in ran.problems() if not re.search(case.left, text)] == []
    assert not [each.text for each in ran.told if re.search(case.words, each.text)]
    num_bad = sum(not math.isfinite(loss) for loss in ran.names["losses"])
    assert num_bad == (case.before.parts["loss"] == ONE_BAD_BATCH)


def test_report_running_statistics_are_reset(tmp_path: Path) -> None:
    ran = program(model=BATCH_NORM, loss=ONE_BAD_BATCH).ran(tmp_path / "a")
    assert "`reset_running_stats()` of a norm" in ran.sentence("buffers of the model").text
    model, x = ran.names["model"], ran.names["x"]
    assert not model.eval()(x).isfinite().all()
    model[1].reset_running_stats()
    model.train()(x)
    assert model.eval()(x).isfinite().all()


# --- warnings of the scaler -----------------------------------------------------------------------


def test_warning_that_names_a_diagnosis(tmp_path: Path) -> None:
    loss, optimizer = "(model(x) * 0).float().sum().log()", "torch.optim.SGD(model.parameters(), 0)"
    before = program(loss=loss, steps=24, optimizer=optimizer)
    warned, *_ = before.ran(tmp_path / "a").warned
    (around,) = re.findall(r"`with (halfstep\.diagnose\(scaler\)):` around the loop", warned)
    said = before.paste(around=around, steps=2).ran(tmp_path / "b").warned
    (found,) = [text for text in said if "went bad" in text]
    assert re.search(r"maths: `log` in the \w+ pass is not finite", found), found
    assert "cure (replayed: finite)" in found


# --- diagnose -------------------------------------------------------------------------------------

STEP = (CORPUS / "step.py").read_text()
FP16 = GIVEN["autocast"]
GIVEN_STEP = {"autocast": FP16, "loss": "y.float().square().mean()", "backward": "loss.backward()"}
SCALED = {"backward": "scaler.scale(loss).backward()"}
FIVE = (
    "layers = [layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))]\n"
    "model = nn.Sequential(*layers)\n"
    "for each in {}: model[each].weight.data.sign_().mul_(3e4)"
)
IDENTITIES = (
    "model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(5)])\n"
    "for each in model: nn.init.eye_(each.weight)\n"
    "x = torch.full((4, 8), 1 + 2**-12)"
)
FLAT = (
    "scaler = {scaler}\n"
    "model = nn.Linear(8, 8)\n"
    "for each in model.parameters(): nn.init.zeros_(each)"
)


def step_program(**parts: str) -> str:
    return STEP.format(**GIVEN_STEP | parts)


def diagnosed(source: str, folder: Path) -> tuple[dict[str, Any], Diagnosis]:
    names = run_file(source, folder / "step.py")
    return names, halfstep.diagnose(names["step"], model=names["model"])


def is_step_finite(source: str, folder: Path) -> bool:
    names, found = diagnosed(source, folder)
    loss = names["step"]()
    gradients = (param.grad for param in names["model"].parameters())
    all_finite = all(each.isfinite().all() for each in (loss, *gradients) if each is not None)
    return all_finite and found.verdict == "none"


POLICIES = {
    "one rule": (FIVE.format([2]), "y.float().square().mean()", "linear@2:fp32"),
    "two rules": (FIVE.format([0, 4]), "y.float().square().mean()", "linear@4:fp32"),
    "three rules": (FIVE.format([0, 4, 6]), "y.float().square().mean()", "linear@6:fp32"),
    "too many rules": (FIVE.format([0, 2, 4, 6]), "y.float().square().mean()", "dtype=torch.bf"),
    "in float32": (IDENTITIES, "(1 / (y.float() - 1)).mean()", 'halfstep.autocast("cpu", enabled'),
}


@pytest.mark.parametrize(("setup", "loss", "cure"), POLICIES.values(), ids=POLICIES)
def test_diagnose_another_autocast(setup: str, loss: str, cure: str, tmp_path: Path) -> None:
    source = step_program(setup=setup, loss=loss)
    _, found = diagnosed(source, tmp_path)
    assert cure in found.cure.text
    call = re.match(r"halfstep\.autocast\([^#]*\)", found.cure.text)
    assert call
    assert is_step_finite(source.replace(FP16, call[0]), tmp_path)


def test_diagnose_a_smaller_scale(tmp_path: Path) -> None:
    scaler = 'halfstep.GradScaler("cpu", init_scale=2.0**24)'
    setup = f"model = nn.Linear(8, 1)\nscaler = {scaler}"
    source = step_program(setup=setup, loss="y.float().square().mean() * 100", **SCALED)
    _, found = diagnosed(source, tmp_path)
    fresh, in_a_run = found.cure.text.split("  # in a run: ")
    assert is_step_finite(source.replace(scaler, fresh), tmp_path)
    setup = f"{setup}\nscaler.scale(torch.ones(()))\n{in_a_run}"
    names = run_file(source.replace(scaler, f"{scaler}\n{in_a_run}"), tmp_path / "b.py")
    assert halfstep.diagnose(names["step"]).verdict == "none"


def test_diagnose_an_edit_that_needs_a_smaller_scale(tmp_path: Path) -> None:
    """The remark says what happens: a scaler comes down to that scale by itself."""
    scaler = 'halfstep.GradScaler("cpu", init_scale=2.0**15)'
    setup = FLAT.format(scaler=scaler)
    source = step_program(setup=setup, loss="y.sqrt().float().sum()", **SCALED)
    _, found = diagnosed(source, tmp_path)
    (edit,) = found.cure.edits
    statement, remark = found.cure.text.split("  # ")
    assert statement == edit.text.strip()
    assert remark == (
        "finite at a loss scale of 2^11, not at the present one; a GradScaler backs off to it by "
        "itself"
    )
    lines = source.splitlines()
    lines[edit.first - 1 : edit.last] = edit.text.splitlines()
    names = run_file("\n".join(lines), tmp_path / "b.py")
    scaler, optimizer = names["scaler"], torch.optim.SGD(names["model"].parameters(), lr=0.0)
    taken = []
    for _ in range(16):
        names["step"]()
        scaler.step(optimizer)
        scaler.update()
        taken.append(bool(scaler.outcome(optimizer)))
        optimizer.zero_grad()
    assert taken.index(True) <= 11
    assert all(taken[taken.index(True) :])
    assert scaler.get_scale() >= 2.0**11


def test_diagnose_edits_no_call_that_the_scaler_makes(tmp_path: Path) -> None:
    """A clamp of the scale would make the step finite, and cannot be pasted."""
    setup = FLAT.format(scaler='halfstep.GradScaler("cpu", init_scale=2.0**16)')
    source = step_program(setup=setup, loss="y.sqrt().float().sum()", **SCALED)
    _, found = diagnosed(source, tmp_path)
    assert "clamp" not in found.cure.text


def test_diagnose_gradients_that_are_left(tmp_path: Path) -> None:
    source = step_program(setup="model = nn.Linear(8, 1)\n{}", loss="y.sum()")
    left = "model.weight.grad = torch.full((1, 8), torch.nan)"
    _, found = diagnosed(source.replace("{}", left), tmp_path)
    (call,) = re.findall(r"call (zero_grad\(\)) first", found.cure.text)
    assert is_step_finite(source.replace("{}", f"{left}\nmodel.{call}"), tmp_path)


# --- run ------------------------------------------------------------------------------------------

SCRIPT = (CORPUS / "script.py").read_text()


@pytest.mark.parametrize(
    ("old", "new", "option"),
    [
        ("", "", "--every=1"),  # the script has an autocast region
        ('with torch.autocast("cpu", dtype=torch.float16)', "if True", "--amp=fp16"),
        ('with torch.autocast("cpu", dtype=torch.float16)', "if model.half()", "--every=1"),
    ],
    ids=["autocast", "amp", "half"],
)
def test_run_diagnose_finds_what_the_report_sends_for(
    tmp_path: Path, old: str, new: str, option: str
) -> None:
    """The cure is an option of ``run``, which needs no edit of the script or of a framework."""

    def halfstep_run(*arguments: object) -> forked.Done:
        return forked.python("-m", "halfstep", "run", *arguments, cwd=tmp_path)

    script = tmp_path / "train.py"
    source = SCRIPT.format(model=NORMED).replace(old, new)
    script.write_text(source.replace("model(x)", "model(x.half())") if "half" in new else source)
    assert "nan" in halfstep_run(option, "-o", "a", script).out
    (advice,) = {
        part.text
        for each in sentences(summarize(read_run(tmp_path / "a")))
        for part in each.cure
        if isinstance(part, Code) and part.text.startswith("halfstep run --diagnose")
    }
    _, _, *options, _ = advice.split()
    found = halfstep_run(*options, "-o", "b", script).err
    (cure,) = re.findall(r"^cure.*finite\):\n(?:  model.*\n)?  halfstep run (.*)", found, re.M)
    script.write_text(source.replace("if model.half()", "if True"))
    assert "nan" not in halfstep_run("-o", "c", *shlex.split(cure)).out
