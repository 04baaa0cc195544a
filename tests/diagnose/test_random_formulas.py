"""Random formulas: a stable form that is given computes the same as the formula.

``HALFSTEP_FUZZ=1`` tries 1,000.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from tests.device import share
from tests.diagnose.kinds.judged import run_file
from tests.dtype_errors.dtype_programs import pasted
from torch import Tensor

import halfstep

NUMBER = 1000 if "HALFSTEP_FUZZ" in os.environ else 24
SOURCE = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4)
mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
w = torch.tensor([0.5, 1.0, 2.0, 0.1])
two = 2
x = GAIN * torch.randn(8, 4)


def step():
    z = model(x)
    BODY
    loss.backward()
    return loss
"""
LEAVES = (
    *("torch.exp({z})", "({z}).exp()", "torch.softmax({z}, 1)", "F.softmax({z}, dim=-1)"),
    *("torch.sigmoid({z})", "(1 - ({z}).sigmoid())", "(1 / (1 + torch.exp({z})))"),
    "torch.cosh({z})",
)
INNER = (
    *("({a} + {b})", "({a} * {b})", "({a} / {b})", "({a}).sum(1, keepdim=True)", "({a} * w)"),
    *("({a} * mask).sum(dim=1, keepdim=True)", "torch.sum({a}, -1, keepdim=True)", "({a} + 1)"),
    *("({a} * 3.0)", "({a} + two)", "({a})[:, :1]", "({a}).flip(0)", "(2 + {a})", "(two * {a})"),
    "({a} + 1e-12)",
)
ENDS = (
    *("loss = torch.log({a}).mean()", "loss = -({a}).log().sum(1).mean()"),
    *("loss = (w * torch.log({a})).mean()", "loss = ({a} * torch.log({a})).mean()"),
    "u = {a} / ({a}).sum(1, keepdim=True)\nloss = (u * w).sum()",
)


def body(rng: random.Random) -> str:
    """Return statements that compute a loss from ``z``, by positive tensors with names or not."""

    def positive(depth: int) -> str:
        kind = rng.random()
        if names and kind < 0.25:
            return rng.choice(names)
        if depth == 0 or kind < 0.45:
            z = rng.choice(("z", "-z", "z / 2", "(z - 1)", "z * two"))
            return rng.choice(LEAVES).format(z=z)
        return rng.choice(INNER).format(a=positive(depth - 1), b=positive(depth - 1))

    names: list[str] = []
    lines = []
    for _ in range(rng.randint(0, 3)):
        name = rng.choice(("p", "q", "e", "z"))
        lines.append("z = z + 1" if name == "z" else f"{name} = {positive(2)}")
        names += [] if name == "z" or name in names else [name]
    return "\n".join([*lines, rng.choice(ENDS).format(a=positive(2))])


def results(source: str, file: Path) -> list[Tensor]:
    """Return the loss and the gradients of a step in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        names = run_file(source.replace("GAIN", "0.5"), file)
        loss = names["step"]()
    finally:
        torch.set_default_dtype(torch.float32)
    return [loss.detach(), *(each.grad for each in names["model"].parameters())]


@pytest.mark.parametrize("part", share(range(4), one_in=4))
def test_a_stable_form_computes_the_same(part: int, tmp_path: Path) -> None:
    num_forms = 0
    for seed in range(part, NUMBER, 4):
        source = SOURCE.replace("BODY", body(random.Random(seed)).replace("\n", "\n    "))
        far = source.replace("GAIN", "300")
        found = halfstep.diagnose(run_file(far, tmp_path / f"{seed}.py")["step"])
        if found.cure is None or not found.cure.edits:
            continue
        if "clamp" in found.cure.text or "torch.tanh" in found.cure.text:  # it bounds values
            continue
        assert found.cure.is_finite
        assert run_file(pasted(far, found.cure.edits), tmp_path / "far.py")["step"]().isfinite()
        cured = pasted(source, found.cure.edits)
        one, other = results(source, tmp_path / "a.py"), results(cured, tmp_path / "b.py")
        torch.testing.assert_close(other, one, rtol=1e-7, atol=1e-9, msg=found.cure.text)
        num_forms += 1
    assert num_forms > NUMBER / 20
