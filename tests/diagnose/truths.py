"""Injected faults, their places, and the expected diagnoses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests.diagnose.corpus.code.harmless import DECOYS
from tests.diagnose.injections import Phase, Verdict
from tests.diagnose.models import spots_of
from tests.diagnose.training import Setting, Training, armed
from torch import nn

Arm = Callable[[Training], None]


@dataclass(frozen=True)
class Truth:
    """Injected fault.

    ``lines``: (file name, number), one of them. ``tensor``: a pattern for what a diagnosis calls
    the bad tensor. ``by_hand``: autocast cannot cure it. None: not asked for.
    """

    verdict: Verdict
    ops: frozenset[str]
    module: str | None
    phase: Phase = "forward"
    forward_op: str | None = None
    lines: frozenset[tuple[str, int]] = frozenset()
    tensor: str | None = None
    by_hand: bool = False


@dataclass(frozen=True)
class Case:
    """Faulty step."""

    fault: str
    setting: Setting
    arm: Arm
    truth: Truth
    warm: bool = False
    decoy: str | None = None

    def __str__(self) -> str:
        return f"{self.fault} in {self.setting.model}, seed {self.setting.seed}"

    def make_bare(self) -> Training:
        """Make the training with the fault and without the decoy."""
        training = self.make()
        for _, place in spots_of(training.model):
            if place.code in DECOYS:
                place.code = None
        return training

    def make(self, *, fault: bool = True, **changes: object) -> Training:
        """Make the training; ``changes`` are those of a cure: policy, scale, dtype."""
        setting = replace(self.setting, **changes)  # type: ignore[arg-type]
        if not fault:
            setting = replace(setting, loss=None, outside=False)
        return armed(setting, self.arm if fault else nothing)


def nothing(training: Training) -> None:
    pass


# --- lines ----------------------------------------------------------------------------------------


@cache
def lines_of(marker: str) -> frozenset[tuple[str, int]]:
    """Return the lines that bear a marker: (file name, number)."""
    found = set()
    folder = Path(__file__).parent
    for path in (*folder.glob("*.py"), *folder.glob("corpus/code/*.py")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            marked = re.search(r"# fault: (.+)$", text)
            if marked and marker in re.split(", ", marked[1]):
                found.add((path.name, number))
    assert found or marker == "none", marker
    return frozenset(found)


def line_of_layer(model: nn.Module, path: str) -> frozenset[tuple[str, int]]:
    """Return the line that calls the layer."""
    parent, _, name = path.rpartition(".")
    for kind in type(model.get_submodule(parent)).__mro__:
        try:
            return lines_of(f"{kind.__name__}.{name}")
        except AssertionError:
            continue
    raise AssertionError(f"no line is marked as the call of {path}")
