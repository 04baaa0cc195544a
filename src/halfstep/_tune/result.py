"""What tuning has found, and how it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from halfstep._autocast import Policy
from halfstep._common.numbers import listed, percent, things
from halfstep._trace.table import aligned, bytes_text, seconds_text
from halfstep._tune.row import Judged, Row, origins
from halfstep._tune.timing import STEP
from halfstep._tune.words import OUTSIDE, error_text, short

GAIN = 0.95
"""Lowering that leaves more than this of the time has given nothing that can be told from noise."""
SLOWER = 1.2
"""A module is called slower if its forward pass takes so many times as long."""
MOST_SLOWER = 5
MANY_ZEROS = 0.05


@dataclass(frozen=True)
class Island:
    """What one island costs and saves.

    Attributes:
        name: That of the module; of an op in a module, ``"softmax@blocks.0.attn"``; of an op
            everywhere, ``"cross_entropy_loss@"``.
        kind: The class of the module; empty for an op everywhere.
        loses_to: What goes wrong in it in lower precision.
        error_without: The worst error of any module, by what it may be, with all but this one.
        error_with: With all of them.
        seconds_lowered: What the module's forward pass takes in lower precision.
        seconds: As an island.
        num_casts: How many casts a step makes more, or fewer if negative.
        cast_bytes: How many bytes these read and write.
    """

    name: str
    kind: str
    loses_to: str
    error_without: Judged
    error_with: Judged
    seconds_lowered: float
    seconds: float
    num_casts: int
    cast_bytes: int


@dataclass(frozen=True)
class Tuned:
    """What :func:`tune` found; ``str()`` of it tells all.

    Attributes:
        policy: The policy to use: the one that was given, and a rule for each island.
        islands: The names of the modules, and ops in modules, that are to stay in float32.
        costs: One for each island.
        is_met: Whether all modules are within bounds then.
        dtype: The lower precision.
        rows: Each module without islands, on the batch on which it is worst, compared with float32.
        rows_after: The same with them.
        seconds: Medians of the whole step, ``"(step)"``, and of the forward passes of modules, in
            ``"fp32"``, in ``"lower"`` precision and, if there are some, with ``"islands"``.
        machine: Where it was measured.
    """

    policy: Policy
    islands: tuple[str, ...]
    costs: tuple[Island, ...]
    is_met: bool
    dtype: torch.dtype
    rows: tuple[Row, ...]
    rows_after: tuple[Row, ...]
    seconds: Mapping[str, Mapping[str, float]]
    machine: str

    def save(self, path: str | Path) -> None:
        """Write the policy as a TOML file, for ``Policy.load``.

        Rules for modules need the model: ``autocast(policy=..., module=model)``.

        Raises:
            OSError: The file cannot be written.
        """
        self.policy.save(path)

    def table(self) -> str:
        """Return a line for each island: what it costs and saves. Empty without islands."""
        if not self.costs:
            return ""
        low = short(self.dtype)
        head: tuple[str, ...] = ("island", "class", f"in {low}", "error without", "with")
        head += (f"forward in {low}", "in fp32", "casts", "cast bytes")
        return "\n".join(aligned([head, *map(_cells, self.costs)], right=()))

    def __str__(self) -> str:
        parts = [self._verdict(), f"policy: {self.policy}", self.table(), *self._time()]
        return "\n".join(part for part in parts if part)

    def __repr__(self) -> str:
        return f"<Tuned {short(self.dtype)}, {things(len(self.islands), 'island')}, {self.policy}>"

    def _verdict(self) -> str:
        low, num = short(self.dtype), things(len(self.rows), "module")
        if not self.is_met:
            failing = [row for row in self.rows_after if not row.passed]
            begin = listed([name or OUTSIDE for name in origins(self.rows_after)]) or OUTSIDE
            return (
                f"{low}: NOT within bounds, whichever modules are islands: {len(failing)} of {num} "
                f"still fail, which begins in {begin}; these islands are of use all the same"
            )
        if not self.islands:
            return f"{low}: {num} within bounds, no island is needed"
        needed = "is needed and enough" if len(self.islands) == 1 else "are needed and enough"
        return f"{low}: {things(len(self.islands), 'island')} in {num} {needed}"

    def _time(self) -> list[str]:
        low, before = short(self.dtype), self.seconds["fp32"][STEP]
        after = self.seconds["lower"][STEP]
        told = f"a step takes {seconds_text(before)} in fp32, {seconds_text(after)} in {low}"
        if self.islands:
            after = self.seconds["islands"][STEP]
            told += f", {seconds_text(after)} with the islands"
        gain = f"{before / after:.2f} times as fast" if after < GAIN * before else ""
        verdict = gain or f"{low} gives no speed here ({self.machine})"
        lines = [f"{told}: {verdict}"]
        slower = self.slower()
        if gain and slower:
            lines.append(f"slower in {low} than in fp32: {listed(slower)}")
        return lines

    def slower(self) -> list[str]:
        """Return the modules that lowering makes slower, forward, the most time lost first."""
        fp32, lower = self.seconds["fp32"], self.seconds["lower"]
        lost = {
            row.module: lower[row.module] - fp32[row.module]
            for row in self.rows
            if row.is_leaf and lower.get(row.module, 0) > SLOWER * fp32.get(row.module, 0)
        }
        return sorted(lost, key=lambda name: -lost[name])[:MOST_SLOWER]


def loses_to(row: Row) -> str:
    """Say what goes wrong in a module: overflow, zeros where float32 has none, or rounding."""
    parts = (row.output, row.input_gradient, row.parameters)
    overflow = max(part.overflow_share for part in parts)
    zeros = max(part.underflow_share for part in parts)
    if overflow:
        return f"overflow, {percent(overflow)}"
    if zeros > MANY_ZEROS:
        return f"zeros, {percent(zeros)}"
    return "rounding"


def worst_error(rows: Sequence[Row]) -> Judged:
    """Return the error of the module that is furthest from what it may be."""
    return max(rows, key=lambda row: row.severity).worst


def _cells(island: Island) -> tuple[str, ...]:
    return (
        island.name.removesuffix("@"),
        island.kind or "-",
        island.loses_to,
        error_text(*island.error_without),
        error_text(*island.error_with),
        seconds_text(island.seconds_lowered),
        seconds_text(island.seconds),
        f"{island.num_casts:+d}",
        f"{'-' if island.cast_bytes < 0 else '+'}{bytes_text(abs(island.cast_bytes))}",
    )
