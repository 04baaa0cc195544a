"""Injected code that goes wrong, with the expected diagnosis.

``# fault: name`` marks the line of the first bad op. What the code returns is such that nothing
after it hides the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.diagnose.models import Code

Verdict = Literal["scale", "range", "maths", "data"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Injection:
    """Code and what a diagnosis must say of it; ``by_hand``: no rule or dtype of autocast helps."""

    name: str
    code: Code
    verdict: Verdict
    ops: frozenset[str]
    phase: Phase
    forward_op: str | None
    by_hand: bool


INJECTIONS: dict[str, Injection] = {}


def bad(
    verdict: Verdict,
    *ops: str,
    gradient_of: str | None = None,
    phase: Phase = "forward",
    by_hand: bool = False,
) -> Callable[[Code], Code]:
    def note(code: Code) -> Code:
        name = code.__name__
        where: Phase = "backward" if gradient_of else phase
        INJECTIONS[name] = Injection(
            name, code, verdict, frozenset(ops), where, gradient_of, by_hand
        )
        return code

    return note
