"""Programs with one fault, as text, and the scripts that run them.

A kind is a function of a :class:`Variety`, a source of random names, sizes and settings, that
returns a :class:`Program`. ``# bad`` marks the line that a diagnosis is to name. A program is
finite with ``batch(False)`` and not with ``batch(True)``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from textwrap import dedent, indent

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

    def named(self, kind: str, number: int) -> Program:
        return replace(self, kind=kind, number=number)

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


# --- variety --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variety:
    """Random choices."""

    rng: random.Random

    def one_of(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def size(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def program(
        self,
        verdict: Verdict,
        ops: str,
        *,
        loss: str,
        bad: str = "",
        batch: str = "",
        gives: str = "x",
        number: tuple[str, str, str] | None = None,
        setup: str | None = None,
        linear: tuple[int, int] | None = None,
        dtypes: tuple[str | None, ...] = (None, "float16", "bfloat16"),
        scales: tuple[float | None, ...] = (None, 1.0, 256.0),
        inputs: int | None = None,
        outputs: int | None = None,
        is_harmless: bool = False,
    ) -> Program:
        """Return a program.

        Args:
            verdict: What is to be said.
            ops: The names of the bad ops, with spaces.
            loss: Statements from the parts of a batch to ``loss``.
            bad: Statements that make a batch bad, after those of ``batch``.
            batch: Statements that make a batch, after ``x`` has been made.
            gives: What a batch returns, ``"x, y"``.
            number: In place of ``gives``, ``batch`` and ``bad``: a number in each batch, by its
                name, its value and its bad value.
            setup: Statements that define ``model``; left out, it is two layers.
            linear: In place of ``setup`` and ``inputs``: the sizes of one layer.
            dtypes: Of autocast, of which one is chosen.
            scales: Of the loss.
            inputs: The last size of ``x``.
            outputs: The size of what the two layers return.
            is_harmless: Whether the program is finite.
        """
        if number is not None:
            name, good, worst = number
            gives, batch, bad = f"x, {name}", f"{name} = {good}", f"{name} = {worst}"
        if linear is not None:
            setup, inputs = f"model = nn.Linear{linear}", linear[0]
        inputs, outputs = inputs or self.size(3, 9), outputs or self.size(3, 6)
        width, rows = self.size(4, 24), self.size(4, 12)
        dtype = self.rng.choice(dtypes)
        if setup is None:
            act = self.one_of("Tanh", "GELU", "SiLU")
            setup = (
                f"model = nn.Sequential(nn.Linear({inputs}, {width}), nn.{act}(), "
                f"nn.Linear({width}, {outputs}))"
            )
        statements = [f"x = torch.randn({rows}, {inputs})", dedent(batch).strip()]
        statements += ["if bad:", indent(dedent(bad).strip(), "    "), f"return ({gives},)"]
        define = "\n".join(filter(None, statements))
        return Program(
            setup=f"{dedent(setup).strip()}\n\n\ndef batch(bad):\n{indent(define, '    ')}\n\n",
            names=tuple(name.strip() for name in gives.split(",")),
            loss=dedent(loss).strip(),
            verdict=verdict,
            ops=frozenset(ops.split()),
            dtype=dtype,
            scale=self.rng.choice(scales) if dtype == "float16" else None,
            around=self.one_of("", "", "compute_loss", "criterion"),
            is_torch=self.rng.random() < 0.2,
            seed=self.rng.randrange(2**20),
            is_harmless=is_harmless,
        )


Kind = Callable[[Variety], Program]
KINDS: dict[str, Kind] = {}


def kind(make: Kind) -> Kind:
    KINDS[make.__name__] = make
    return make
