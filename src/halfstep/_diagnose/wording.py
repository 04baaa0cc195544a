"""A diagnosis as text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep._common.numbers import percent
from halfstep._trace.rows import short

if TYPE_CHECKING:
    from halfstep._diagnose.diagnosis import BadOp, Cure, Diagnosis, Flush, Line, Operand

MOST_FLUSHES = 10
"""So many ops that flush values are printed."""
_MOST_ENDS = 3
_NO_FLUSH = 0.0005
"""Smaller shares are not worth a line."""


def text(found: Diagnosis) -> str:
    """Return a diagnosis as lines to read."""
    lines = [_headline(found)]
    if found.bad is not None:
        lines += [f"  {name:<9}{value}" for name, value in _facts(found, found.bad)]
    if found.cure is not None:
        lines += _cure(found.cure)
    lines += list(_underflow(found.underflow))
    lines += [f"  note     {note}" for note in found.notes]
    lines += [f"  rank {other.rank}: {_headline(other)}" for other in found.others]
    lines.append(f"{found.num_replays} replays, {found.seconds:.2f} s")
    return "\n".join(lines)


def _headline(found: Diagnosis) -> str:
    bad = found.bad
    where = "" if bad is None else f"{_op(bad)}{_in_module(bad.module)}, {bad.phase}"
    dtype = "the dtype" if bad is None or bad.output is None else bad.output.dtype
    match found.verdict:
        case "none":
            return "the step is finite: every loss, and every gradient"
        case "scale":
            return f"scale: {where} overflows {dtype} because the loss is scaled by too much"
        case "range":
            return f"range of {dtype}: {where} needs a wider dtype, in float32 it is finite"
        case "maths":
            return f"maths: {where} is not finite in float32 either"
        case "data":
            return f"data: {found.tensor} was bad before the step; {where} reads it first"
        case _:
            return f"unknown: {where}" if where else "unknown"


def _facts(found: Diagnosis, bad: BadOp) -> Iterator[tuple[str, str]]:
    yield "op", f"{_op(bad)}{_in_module(bad.module)}, call {bad.call}, {bad.phase}"
    if bad.rule:
        yield "rule", bad.rule
    if bad.line is not None:
        yield "line", line_text(bad.line)
    if bad.forward_op is not None:
        line = "" if bad.forward_line is None else f"  {line_text(bad.forward_line)}"
        yield "gradient", f"of {bad.forward_op}{line}"
    for operand in bad.inputs:
        yield "reads", _operand(operand)
    if bad.output is not None:
        yield "returns", _operand(bad.output)
    if bad.needs is not None and bad.limit is not None and bad.output is not None:
        end = f"{bad.output.dtype} ends at {_number(bad.limit)}"
        if bad.needs > bad.limit:
            yield "needs", f"{_number(bad.needs)}, {end}: {bad.needs / bad.limit:.3g} times as much"
    if found.scale is not None:
        yield "scale", f"{found.scale:g}"
    if found.ends:
        more = len(found.ends) - _MOST_ENDS
        ends = ", ".join(found.ends[:_MOST_ENDS]) + (f" and {more} more" if more > 0 else "")
        what = ends if found.ends == ("loss",) else f"gradients of {ends}"
        yield "ends in", what


def _cure(cure: Cure) -> list[str]:
    said = {
        True: "cure (replayed: finite):",
        False: "tried, and not enough (replayed: not finite):",
        None: "cure (not replayed):",
    }
    return [said[cure.is_finite], f"  {cure.text}"]


def _underflow(flushes: tuple[Flush, ...]) -> Iterator[str]:
    worth = [flush for flush in flushes if flush.share > _NO_FLUSH]
    if not worth:
        return
    yield "underflow, the share of values that are rounded to zero:"
    for flush in worth[:MOST_FLUSHES]:
        where = f"{flush.phase} {flush.op}{_in_module(flush.module)} ({short(flush.dtype)})"
        scales = ", ".join(
            f"{percent(count / flush.values)} at {scale:g}" for scale, count in flush.at_scales
        )
        yield f"  {percent(flush.share):>7}  {where}" + (f"; {scales}" if scales else "")
    if len(worth) > MOST_FLUSHES:
        yield f"  and {len(worth) - MOST_FLUSHES} more"


def line_text(line: Line) -> str:
    """Return where a line stands, relative to the working directory, and what it says."""
    path = Path(line.file)
    if path.is_relative_to(Path.cwd()):
        path = Path(os.path.relpath(path))
    return f"{path}:{line.number} in {line.function}: {line.text}"


def _op(bad: BadOp) -> str:
    if bad.op == "_to_copy":
        return f"the cast for {bad.name}" if bad.name != "_to_copy" else "a cast"
    return bad.op if bad.name == bad.op else f"{bad.name} ({bad.op})"


def _in_module(module: str) -> str:
    return f" in {module}" if module else ""


def _operand(operand: Operand) -> str:
    shape = ", ".join(map(str, operand.shape))
    name = f"{operand.name} " if operand.name else ""
    parts = []
    if operand.low is not None and operand.high is not None:
        parts.append(f"{_number(operand.low)} to {_number(operand.high)}")
    for count, what in ((operand.nan, "NaN"), (operand.inf, "inf"), (operand.zeros, "zero")):
        if count:
            parts.append(f"{count} {what}")
    return f"{name}{operand.dtype}[{shape}]: {', '.join(parts)}"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"
