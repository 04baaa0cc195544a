"""Stable forms of formulas as cures: what they say, what they are equal to, and how they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import share
from tests.diagnose.formulas import FORMULAS, judge
from tests.diagnose.kinds.judged import run_file
from tests.dtype_errors.dtype_programs import pasted

import halfstep

IN_WORDS = {
    "of_a_module": "use torch.log_softmax(logits, 1).gather(1, y[:, None]), where logits is the "
    "input of softmax at ",
    "of_a_function": "use torch.log_softmax(logits, 1).gather(1, y[:, None]), where logits is the "
    "input of softmax at ",
}
"""The cures of formulas in two functions, which cannot be pasted at one place."""
PASTED = [name for name in FORMULAS if name not in IN_WORDS]


@pytest.mark.parametrize("name", share(PASTED, one_in=5))
def test_the_cure_computes_what_the_formula_computes_and_learns(name: str, tmp_path: Path) -> None:
    """In float64 and far from its limits, losses and gradients are equal."""
    judged = judge(name, tmp_path)
    assert judged.learns, f"{judged.before} to {judged.after}\n{judged.found}"
    assert "clamp" not in judged.found.cure.text
    source = FORMULAS[name].source
    results = []
    for number, text in enumerate((source, pasted(source, judged.found.cure.edits))):
        small = text.replace(f"* {FORMULAS[name].gain}", f"* {FORMULAS[name].gain / 20}")
        exact = small.replace("torch.manual_seed(0)", "torch.set_default_dtype(torch.float64)")
        torch.manual_seed(0)
        try:
            names = run_file(exact, tmp_path / f"{number}.py")
            loss = names["step"]()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append([loss.detach(), *(each.grad for each in names["model"].parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-10)


@pytest.mark.whole_trials
@pytest.mark.parametrize("name", IN_WORDS)
def test_what_cannot_be_pasted_at_one_place_is_said(name: str, tmp_path: Path) -> None:
    found = judge(name, tmp_path).found
    assert found.cure.is_finite
    assert IN_WORDS[name] in found.cure.text
    assert "20 small steps on this batch: the loss falls from 126.6 to 77.54" in str(found)


HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Linear(4, 4)
x = 300 * torch.randn(8, 4)


def step():
    z = model(x)
"""


def diagnosed(body: str, folder: Path, head: str = HEAD) -> Any:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = f"{head}{lines}    loss.backward()\n    return loss\n"
    found = halfstep.diagnose(run_file(source, folder / "a.py")["step"])
    if found.cure is not None and found.cure.edits:
        loss = run_file(pasted(source, found.cure.edits), folder / "b.py")["step"]()
        assert bool(loss.isfinite()) == found.cure.is_finite
    return found.cure


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("loss = torch.log(torch.exp(z).sum())", "loss = torch.logsumexp(z.flatten(), 0)"),
        ("loss = z.exp().sum((0, 1)).log()", "loss = torch.logsumexp(z, (0, 1))"),
        ("loss = z.exp().add(3.0).log().mean()", "- 1.0986122886681098) + 1.0986122886681098)"),
        ("loss = (z.abs().exp() * 2).log().mean()", "loss = (z.abs() + 0.6931471805599453).mean()"),
        ("loss = (2 * 3.0 * z.abs().exp()).log().mean()", "loss = (z.abs() + 1.791759469228055).m"),
        (
            "model.tau = 2.0\nloss = (model.tau * z.abs().exp()).log().mean()",
            "loss = (z.abs() + torch.tensor(model.tau).log()).mean()",
        ),
        # An expression with calls is computed once, under a new name.
        (
            "e = torch.exp(model(x))\nloss = (e / e.sum(1, keepdim=True)).log().mean()",
            "exponent = model(x)\ne = torch.exp(exponent)\n"
            "loss = torch.log_softmax(exponent, 1).mean()",
        ),
        # A name may stand for another number in the next step.
        (
            "w = 2\nloss = (z.exp() * w + 3.0).log().mean()",
            "F.softplus(z + torch.tensor(w).log() - 1.0986122886681098) + 1.0986122886681098",
        ),
        (
            "one = 1\nloss = (one + z.exp()).log().mean()",
            "F.softplus(z - torch.tensor(one).log()) + torch.tensor(one).log()",
        ),
        (
            "eps, axis = 1e-6, 1\nloss = (z.exp().sum(dim=axis) + eps).log().mean()",
            "loss = torch.logsumexp(z, axis).mean()",
        ),
        # A tensor may be its own result.
        (
            "loss = z.exp().contiguous().flatten(1).sum(1).log().mean()",
            "loss = torch.logsumexp(z, 1).mean()",
        ),
        # So is one whose names have other values where it is needed.
        (
            "z = torch.exp(z)\nloss = z.sum(1).log().mean()",
            "exponent = z\nz = torch.exp(exponent)\nloss = torch.logsumexp(exponent, 1).mean()",
        ),
        (
            "e, exponent = torch.exp(z + 0 * model(x)), 1\nloss = e.sum(1).log().mean()",
            "exponent_2 = z + 0 * model(x)\ne, exponent = torch.exp(exponent_2), 1"
            "\nloss = torch.logsumexp(exponent_2, 1).mean()",
        ),
    ],
)
def test_the_text(body: str, text: str, tmp_path: Path) -> None:
    cure = diagnosed(body, tmp_path)
    assert cure.is_finite
    assert text in cure.text


@pytest.mark.parametrize(
    "body",
    [
        # The exponent is changed in place before the formula ends.
        "e = torch.exp(z)\nwith torch.no_grad():\n    z.zero_()\nloss = e.sum(1).log().mean()",
        # The formula is a loop, or depends on a branch.
        "e = z.exp()\nfor _ in range(2):\n    e = e * z.exp()\nloss = e.sum(1).log().mean()",
        "if len(z):\n    e = z.exp()\nloss = e.sum(1).log().mean()",
        # It is a list of parts.
        "e = [row.exp() for row in z]\nloss = torch.stack([row.sum().log() for row in e]).mean()",
        # It has no logarithm in the rules: of a difference, and of a tensor with negative entries.
        "loss = (z.exp() - z.exp().mean()).log().mean()",
        "loss = (z.exp() * z).sum(1).log().mean()",
    ],
)
def test_a_formula_that_cannot_be_rewritten_here_is_left(body: str, tmp_path: Path) -> None:
    cure = diagnosed(body, tmp_path)
    assert cure is None or "logsumexp" not in cure.text or not cure.edits


def test_names_of_modules_are_those_of_the_file(tmp_path: Path) -> None:
    head = HEAD.replace("import torch\n", "import torch\nimport torch as th\n")
    head = head.replace("from torch.nn import functional as F\n", "")
    head = head.replace("torch.", "th.").replace("import torch\n", "", 1)
    cure = diagnosed("loss = th.log(1 + th.exp(z)).mean()", tmp_path, head)
    assert cure.text == "loss = th.nn.functional.softplus(z).mean()"


# --- learning -------------------------------------------------------------------------------------


def test_of_two_finite_cures_the_one_that_learns_is_given(tmp_path: Path) -> None:
    """Clamped at e^79, the loss is all of its limit; clamped at e^22, it is not."""
    cure = diagnosed("loss = (z.exp() - 1e4 * z * z).mean()", tmp_path)
    assert cure.is_finite
    assert cure.losses[-1] < cure.losses[0]


@pytest.mark.whole_trials
def test_a_loss_that_stands_is_said(tmp_path: Path) -> None:
    source = f"{HEAD}    loss = (z * 0).log().sum()\n    loss.backward()\n"
    found = halfstep.diagnose(run_file(source, tmp_path / "a.py")["step"])
    assert "tried for 20 small steps on this batch: the loss stays at " in str(found)
