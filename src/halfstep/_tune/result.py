"""Result of tuning, and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from halfstep._autocast import Policy
from halfstep._common.numbers import listed, percent, things
from halfstep._trace.text import aligned, bytes_text, seconds_text
from halfstep._tune.measurer import STEP
from halfstep._tune.module_check import (
    OUTSIDE,
    BoundedError,
    ModuleCheck,
    error_text,
    origins,
    short_dtype,
)

GAIN = 0.95
"""A gain that leaves more than this share of the time counts as noise."""
SLOWER = 1.2
"""The factor of time from which the forward pass of a module is called slower."""
MOST_SLOWER = 5
MANY_ZEROS = 0.05


@dataclass(frozen=True)
class Island:
    """Cost and effect of one island.

    Attributes:
        name: The name of the module; for an op in a module, ``"softmax@blocks.0.attn"``; for an op
            everywhere, ``"cross_entropy_loss@"``.
        kind: The class of the module; empty for an op everywhere.
        loses_to: The problem that it has in lower precision.
        error_without: The worst error of any module without this island, but with the others.
        error_with: The worst error with all islands.
        seconds_lowered: The time of the module's forward pass in lower precision.
        seconds: The same time as an island.
        num_casts: The number of casts that a step makes more, or fewer if negative.
        cast_bytes: The bytes that these casts read and write.
    """

    name: str
    kind: str
    loses_to: str
    error_without: BoundedError
    error_with: BoundedError
    seconds_lowered: float
    seconds: float
    num_casts: int
    cast_bytes: int


@dataclass(frozen=True)
class Tuned:
    """Result of :func:`tune`; its ``str()`` is a report.

    Attributes:
        policy: The policy to use: the given one, with a rule for each island.
        islands: The names of the modules, and ops in modules, that stay in float32.
        costs: The cost of each island.
        is_met: Whether all modules are within bounds with the islands.
        dtype: The lower precision.
        rows: The modules without islands, compared with float32 on their worst batches.
        rows_after: The same with the islands.
        seconds: Median times of the whole step, ``"(step)"``, and of the forward passes of modules,
            in ``"fp32"``, in ``"lower"`` precision and, if there are any, with ``"islands"``.
        machine: The machine on which it was measured.
    """

    policy: Policy
    islands: tuple[str, ...]
    costs: tuple[Island, ...]
    is_met: bool
    dtype: torch.dtype
    rows: tuple[ModuleCheck, ...]
    rows_after: tuple[ModuleCheck, ...]
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
        """Return a line of cost and effect for each island. Empty without islands."""
        if not self.costs:
            return ""
        low = short_dtype(self.dtype)
        head: tuple[str, ...] = ("island", "class", f"in {low}", "error without", "with")
        head += (f"forward in {low}", "in fp32", "casts", "cast bytes")
        return "\n".join(aligned([head, *map(_cells, self.costs)], right=()))

    def __str__(self) -> str:
        parts = [self._verdict(), f"policy: {self.policy}", self.table(), *self._time()]
        return "\n".join(part for part in parts if part)

    def __repr__(self) -> str:
        low, islands = short_dtype(self.dtype), things(len(self.islands), "island")
        return f"<Tuned {low}, {islands}, {self.policy}>"

    def _verdict(self) -> str:
        low, num = short_dtype(self.dtype), things(len(self.rows), "module")
        if not self.is_met:
            failing = [row for row in self.rows_after if not row.passed]
            begin = listed([name or OUTSIDE for name in origins(self.rows_after)]) or OUTSIDE
            return (
                f"{low}: NOT within bounds, whichever modules are islands: {len(failing)} of {num} "
                f"still fail, and it begins in {begin}; the islands found help all the same"
            )
        if not self.islands:
            return f"{low}: {num} within bounds, no island is needed"
        needed = "is needed and enough" if len(self.islands) == 1 else "are needed and enough"
        return f"{low}: {things(len(self.islands), 'island')} in {num} {needed}"

    def _time(self) -> list[str]:
        low, before = short_dtype(self.dtype), self.seconds["fp32"][STEP]
        after = self.seconds["lower"][STEP]
        text = f"a step takes {seconds_text(before)} in fp32, {seconds_text(after)} in {low}"
        if self.islands:
            after = self.seconds["islands"][STEP]
            text += f", {seconds_text(after)} with the islands"
        gain = f"{before / after:.2f} times as fast" if after < GAIN * before else ""
        verdict = gain or f"{low} gives no speed here ({self.machine})"
        lines = [f"{text}: {verdict}"]
        slower = self.slower()
        if gain and slower:
            lines.append(f"slower in {low} than in fp32: {listed(slower)}")
        return lines

    def slower(self) -> list[str]:
        """Return the modules whose forward pass is slower in lower precision, worst first."""
        fp32, lower = self.seconds["fp32"], self.seconds["lower"]
        lost = {
            row.module: lower[row.module] - fp32[row.module]
            for row in self.rows
            if row.is_leaf and lower.get(row.module, 0) > SLOWER * fp32.get(row.module, 0)
        }
        return sorted(lost, key=lambda name: -lost[name])[:MOST_SLOWER]


def loses_to(row: ModuleCheck) -> str:
    """Return the problem of a module: overflow, zeros that float32 does not have, or rounding."""
    parts = (row.output, row.input_gradient, row.parameters)
    overflow = max(part.overflow_share for part in parts)
    zeros = max(part.underflow_share for part in parts)
    if overflow:
        return f"overflow, {percent(overflow)}"
    if zeros > MANY_ZEROS:
        return f"zeros, {percent(zeros)}"
    return "rounding"


def worst_error(rows: Sequence[ModuleCheck]) -> BoundedError:
    """Return the error of the module that is worst relative to its tolerance."""
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
