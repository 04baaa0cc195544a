"""Programs with one fault, as text, and the scripts that run them.

A kind is a file of ``corpus/kinds``, of which :func:`read` draws a :class:`Program`::

    # expect: VERDICT of OP OP, one of which is bad, or its gradient
    # $name: what stands for $name in the program; one such line is chosen, or a number of 4 to 9
    # dtypes: of autocast, of which one is chosen
    # scales: of the loss, of which one is chosen
    # inputs: the last size of x
    # outputs: the size of what the two layers return that are the model where no setup stands

    # --- setup
    statements that define model
    # --- batch: what a batch has, x and more
    statements that make one, after x has been made
    # --- bad batch
    statements that make it bad
    # --- loss
    statements from the parts of a batch to loss

``# bad`` marks the line that a diagnosis is to name. A program is finite with ``batch(False)`` and
not with ``batch(True)``.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from string import Template
from textwrap import indent
from typing import cast

from tests.device import DEVICE
from tests.diagnose.injections import Verdict

MARK = "# bad"
_IMPORTS = """\
import math

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
"""


@dataclass(frozen=True)
class Program:
    """Parts of a program.

    Attributes:
        setup: Statements at the top of the file: they define ``model``, and the function
            ``batch(bad)`` that returns the values of ``names``.
        names: The names of the parts of a batch, in the forward pass.
        loss: Statements that compute ``loss`` from them.
        verdict: What is to be said.
        ops: The names of ATen ops, one of which is bad, or its gradient.
        dtype: Autocast's dtype, None without autocast.
        scale: The scale of the loss, None without a scaler.
        around: The function around the statements; empty where they stand in the loop.
        is_torch: Whether autocast is that of PyTorch.
        seed: The seed of the weights and the batch.
        is_harmless: Whether it is to be called finite, with ``batch(True)`` too.
        region: The expression of the autocast region, where it is another one.
    """

    setup: str
    names: tuple[str, ...]
    loss: str
    verdict: Verdict
    ops: frozenset[str]
    dtype: str | None
    scale: float | None
    around: str
    is_torch: bool
    seed: int
    is_harmless: bool = False
    region: str = ""
    kind: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind}[{self.number}]"

    @property
    def autocast(self) -> str:
        """The expression that makes the autocast region; empty without one."""
        if self.region or self.dtype is None:
            return self.region
        package = "torch" if self.is_torch else "halfstep"
        return f'{package}.autocast("{DEVICE}", torch.{self.dtype})'

    @property
    def scaler(self) -> str:
        """The expression that makes the scaler."""
        if self.scale is None:
            return f'halfstep.GradScaler("{DEVICE}", enabled=False)'
        return f'halfstep.GradScaler("{DEVICE}", init_scale={self.scale:g})'

    @property
    def head(self) -> str:
        """The top of a script: imports, ``model``, ``batch``, ``optimizer`` and ``scaler``."""
        parts = [_IMPORTS, f"torch.manual_seed({self.seed})", self.setup]
        parts += ["optimizer = torch.optim.SGD(model.parameters(), lr=0.0)"]
        parts += [f"scaler = {self.scaler}"]
        if self.around:
            body = indent(f"{self.loss}\nreturn loss", "    ")
            parts += [f"\ndef {self.around}({', '.join(self.names)}):\n{body}\n"]
        return "\n".join(parts)

    @property
    def forward(self) -> str:
        """The statements from the parts of a batch to ``loss``, under autocast."""
        given = ", ".join(self.names)
        text = f"loss = {self.around}({given})" if self.around else self.loss
        return f"with {self.autocast}:\n{indent(text, '    ')}" if self.autocast else text


def step_script(program: Program, *, bad: bool = True) -> str:
    """Return a script with the function ``step``, for ``halfstep.diagnose(step, model=model)``."""
    body = f"optimizer.zero_grad()\n{program.forward}\nscaler.scale(loss).backward()\nreturn loss"
    given = ", ".join(program.names)
    return f"{program.head}\n{given}, = batch({bad})\n\n\ndef step():\n{indent(body, '    ')}\n"


BAD_STEP, NUM_STEPS = 3, 4

_LEAVES = (
    "",
    "if not math.isfinite(loss.item()):\n    optimizer.zero_grad()\n    continue",
    "if torch.isnan(loss).any() or loss.isinf():\n    break",
    "if loss.detach() != loss.detach():\n    raise SystemExit(1)",
)
"""What a loop does with a loss that is not finite."""


def loop_script(program: Program, *, bad: bool = True, around: str = "") -> str:
    """Return a script with a training loop whose step :data:`BAD_STEP` is bad.

    ``around``: a statement that begins a block around the loop. ``finite`` is whether the loss and
    the gradients of each step were, ``losses`` are those of the steps that were not left out.
    """
    given = ", ".join(program.names)
    leave = _LEAVES[program.seed % len(_LEAVES)] if bad else ""
    body = f"""\
{given}, = batches[i]
optimizer.zero_grad()
{program.forward}
finite.append(is_finite([loss]))
{leave}
scaler.scale(loss).backward()
finite[-1] &= is_finite(p.grad for p in model.parameters())
scaler.step(optimizer)
scaler.update()
losses.append(loss.detach())
"""
    loop = f"for i in range({NUM_STEPS}):\n{indent(body, '    ')}"
    return "\n".join(
        (
            f"from {__package__}.judged import is_finite\n",
            program.head,
            "finite, losses = [], []",
            f"batches = [batch({bad} and i == {BAD_STEP - 1}) for i in range({NUM_STEPS})]",
            f"told = []\n{around}\n{indent(loop, '    ')}" if around else loop,
        )
    )


# --- the corpus -----------------------------------------------------------------------------------


def read(file: Path, rng: random.Random) -> Program:
    """Return a random variant of a kind."""
    head, *parts = re.split(r"^# --- (.*)\n", file.read_text(), flags=re.M)
    said = dict(re.findall(r"^# (\w+): (.*)$", head, re.M))
    chosen: dict[str, str] = {}
    for names, lines in groupby(
        re.findall(r"^# (\$[$\w, ]+):(.*)$", head, re.M), key=lambda line: line[0]
    ):
        choices = [choice.strip() for _, choice in lines]
        if between := re.fullmatch(r"(\d+) to (\d+)", choices[0]):
            choice = str(rng.randint(*map(int, between.groups())))
        else:
            choice = rng.choice(choices)
        chosen |= zip(
            names.replace("$", "").split(", "), map(str.strip, choice.split(";")), strict=True
        )

    def filled(text: str) -> str:
        while text != (text := Template(text).substitute(chosen)):
            pass
        return text.strip()

    texts = dict(zip(parts[::2], map(filled, parts[1::2]), strict=True))
    [batch] = [name for name in texts if name.startswith("batch: ")]
    gives = filled(batch[7:])
    inputs, outputs = (
        int(said[name]) if name in said else rng.randint(3, most)
        for name, most in (("inputs", 9), ("outputs", 6))
    )
    width, rows = rng.randint(4, 24), rng.randint(4, 12)
    dtype = rng.choice(said.get("dtypes", "none float16 bfloat16").split())
    if "setup" not in texts:
        texts["setup"] = (
            f"model = nn.Sequential(nn.Linear({inputs}, {width}), "
            f"nn.{rng.choice(('Tanh', 'GELU', 'SiLU'))}(), nn.Linear({width}, {outputs}))"
        )
    statements = [f"x = torch.randn({rows}, {inputs})", texts[batch]]
    statements += ["if bad:", indent(texts["bad batch"], "    "), f"return ({gives},)"]
    define = "\n".join(filter(None, statements))
    verdict, _, ops = filled(said["expect"]).partition(" of ")
    scales = said.get("scales", "none 1 256").split()
    scale = rng.choice(scales) if dtype == "float16" else "none"
    return Program(
        setup=f"{texts['setup']}\n\n\ndef batch(bad):\n{indent(define, '    ')}\n\n",
        names=tuple(gives.split(", ")),
        loss=texts["loss"],
        verdict=cast(Verdict, verdict),
        ops=frozenset(ops.split()),
        dtype=None if dtype == "none" else dtype,
        scale=None if scale == "none" else float(scale),
        around=rng.choice(("", "", "compute_loss", "criterion")),
        is_torch=rng.random() < 0.2,
        seed=rng.randrange(2**20),
    )
