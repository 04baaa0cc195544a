"""Diagnosis of a step as plain values, JSON and text."""

from __future__ import annotations

import json
import linecache
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from textwrap import dedent
from typing import Literal, Self

from halfstep._common.numbers import power, things
from halfstep._common.text import Code, one_line
from halfstep._tools.json import Count, Finite, Positive, decoded, to_plain
from halfstep._tools.line import Line, LineEdit, line_text, short_path
from halfstep._tools.replay import NO_END
from halfstep._tools.trace.rows import Phase

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

Verdict = Literal["none", "scale", "range", "maths", "growth", "optimizer", "data", "unknown"]
"""The cause: see :class:`Diagnosis`."""
A_NUMBER = "the number "  # which begins what stands for a tensor's name if a Python number is bad
BY_THE_OP_ALONE = "judged by the op alone"
"""The end of a note: no replay of the whole step in float32 was finite."""
CureKind = Literal["policy", "scale", "dtype", "code", "data", "look"]


@dataclass(frozen=True)
class Operand:
    """Tensor that an op read or returned.

    Attributes:
        name: The name of the parameter, buffer or gradient (``"weight.grad"``); empty for other
            tensors.
        dtype: The name of its dtype, ``"float16"``.
        shape: Its shape.
        low: The smallest finite value; None if there is none.
        high: The largest finite value; None if there is none.
        nan: The number of entries that are NaN.
        inf: The number of entries that are inf or -inf.
        zeros: The number of entries that are zero.
        negative_inf: The number of entries that are -inf.
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    low: Finite | None
    high: Finite | None
    nan: Count
    inf: Count
    zeros: Count
    negative_inf: Count = 0


@dataclass(frozen=True)
class BadOp:
    """First op whose inputs were finite and whose output is not.

    Attributes:
        op: The name of the ATen op, such as ``"addmm"``; ``"_to_copy"`` for a cast.
        name: The name of the op in a policy, such as ``"linear"``. A ``where`` inside a function
            has the name of that function, such as ``"logdet"``.
        module: The path of its module; empty in the model's own ``forward`` and outside the model.
        call: The number of the call of that module in which it ran, from 1; 0 outside of modules.
        phase: The phase in which it ran; ``"recompute"`` is a forward pass that checkpointing
            repeats.
        rule: The text of the policy's rule that decided, if any.
        line: The line of code that called it. In the backward pass, only known for a backward
            written in Python.
        forward_op: In the backward pass, the op whose gradient it computes.
        forward_line: The line that called that op.
        inputs: Its inputs, before it wrote to any of them.
        output: Its output.
        needs: The largest magnitude of the result in float64; None if that result is not finite
            either, or if the op cannot run in float64.
        limit: The largest finite number in the dtype of the result.
    """

    op: str
    name: str
    module: str
    call: Count
    phase: Phase
    rule: str | None
    line: Line | None
    forward_op: str | None
    forward_line: Line | None
    inputs: tuple[Operand, ...]
    output: Operand | None
    needs: Finite | None
    limit: Positive | None

    @property
    def excess(self) -> float | None:
        """By how much a result that fits float32 is too large for its dtype; None if it is not."""
        if self.needs is None or self.limit is None:
            return None
        is_beyond = self.limit < self.needs <= _LARGEST_FLOAT32
        return self.needs / self.limit if is_beyond else None

    @property
    def is_overflow(self) -> bool:
        """Whether the result is known to be too large for its dtype."""
        if self.needs is None:  # float64 cannot hold it either
            return self.op in ("exp", "exp2", "expm1", "cosh")
        return self.limit is not None and self.needs > self.limit

    @property
    def is_beyond_its_dtype(self) -> bool:
        """Whether the result fits float32 but not its own dtype."""
        return self.excess is not None


@dataclass(frozen=True)
class Cure:
    """Change that makes a step finite.

    Attributes:
        kind: The kind of change: a policy, a scale, a dtype, the code, or the data; or ``"look"``
            if no cure was found.
        text: The code to paste, or the action to take, or where to look.
        is_finite: Whether a replay of the step with it, and its trial, were finite; None if it was
            not replayed.
        policy: The text of the policy, if the cure has one.
        scale: The scale, if the cure has one.
        dtype: The name of the autocast dtype, if the cure changes it.
        edits: The statements to replace; empty if ``text`` is not source code of the user's.
        trial: The steps that were taken with it in replays, such as ``"20 steps of Adam on this
            batch"``; empty if there were none.
        has_small_steps: Whether they were no optimizer's, and too small to make a loss rise.
        losses: The losses of the batch before each of these steps on it, and after the last.
        remarks: What it changes, and how its loss compares with those of the run.
        changed: The largest share of values that one of its edits takes from where they were, which
            get no gradient then: in the step, and of two batches at the end of the trial.
    """

    kind: CureKind
    text: str
    is_finite: bool | None = None
    policy: str | None = None
    scale: float | None = None
    dtype: str | None = None
    edits: tuple[LineEdit, ...] = ()
    trial: str = ""
    has_small_steps: bool = False
    losses: tuple[Finite, ...] = ()
    remarks: tuple[str, ...] = ()
    changed: tuple[Finite, ...] = ()


def pasted(edits: Sequence[LineEdit], *remarks: str) -> Cure:
    """Return edits of the user's code as a cure that was not tried."""
    text = "\n".join(dedent(edit.text) for edit in edits)
    return Cure("code", text, edits=tuple(edits), remarks=remarks)


@dataclass(frozen=True)
class Diagnosis:
    """Result of :func:`halfstep.diagnose`; its ``str()`` is a report.

    Attributes:
        verdict: ``"none"``: the step is finite. ``"scale"``: a gradient overflows, and a smaller
            loss scale cures it. ``"range"``: the value is finite in float32, but does not fit its
            dtype. ``"maths"``: the value is not finite in float32 either. ``"growth"``: the values
            grew from step to step until one no longer fitted. ``"optimizer"``: a step of an
            optimizer made weights bad of finite gradients. ``"data"``: a parameter, a buffer or the
            batch was bad before the step. ``"unknown"``: see the notes.
        bad: The first bad op. For ``"data"``, the op that read the bad tensor first.
        tensor: For ``"data"`` and ``"optimizer"``, the name of the bad tensor.
        ends: ``"loss"`` if the loss is not finite, else the names of the parameters whose gradients
            are not finite.
        scale: The scale of the loss; None if it is not scaled.
        cure: The cure; None if none was found.
        notes: Other remarks, one line each.
        num_replays: The number of times the step was run.
        seconds: The time for all replays, in seconds.
        rank: The rank that made the diagnosis.
        source: The lines of code around the line of ``bad``, each with its number.
        is_finite_in_float32: Whether a replay in float32 was finite; None if there was none, or if
            it went bad elsewhere.
        happened: For ``"growth"`` and ``"optimizer"``, what happened, as a sentence. For
            ``"none"``, that another rank is at fault, if there are several. For ``"maths"`` and
            ``"range"``, which weight the loop wrote the values to, if it did so between steps.

    Example:
        >>> import halfstep, torch
        >>> x = torch.tensor([1.0, 0.0], requires_grad=True)
        >>> def step():
        ...     torch.log(x).sum().backward()
        >>> found = halfstep.diagnose(step)
        >>> found.verdict, found.bad.op, found.cure.text
        ('maths', 'log', 'torch.log(x.clamp_min(1e-06)).sum().backward()')
    """

    verdict: Verdict
    bad: BadOp | None = None
    tensor: str | None = None
    ends: tuple[str, ...] = ()
    scale: float | None = None
    cure: Cure | None = None
    notes: tuple[str, ...] = ()
    num_replays: Count = 0
    seconds: float = 0.0
    rank: Count = 0
    source: tuple[str, ...] = ()
    happened: str = ""
    is_finite_in_float32: bool | None = None

    def __str__(self) -> str:
        said = sentence(self)
        lines = [said if self.verdict == "none" else f"{self.verdict}: {said}"]
        facts = [] if self.bad is None else [*_facts(self, self.bad)]
        facts += _ends(self)
        lines += [f"  {name:<9}{value}".rstrip() for name, value in facts]
        if self.cure is not None:
            lines += _cure(self.cure)
        lines += [f"  note     {note}" for note in self.notes]
        of_rank = f", on rank {self.rank}" if self.rank else ""
        lines.append(f"{things(self.num_replays, 'replay')}, {self.seconds:.2f} s{of_rank}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the diagnosis as JSON that :meth:`from_json` reads."""
        return json.dumps(to_plain(asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the diagnosis that :meth:`to_json` wrote.

        Raises:
            ValueError: The text is not JSON, or a field is missing or has the wrong type.
        """
        return decoded(cls, text)


# --- text -----------------------------------------------------------------------------------------

_MOST_ENDS = 3


def predicate(found: Diagnosis) -> str:
    """Return what is said of a bad step before the diagnosis of a rank, which may be innocent."""
    is_innocent = found.verdict == "none" and found.happened
    return "got inf or NaN from another rank" if is_innocent else "went bad"


def sentence(found: Diagnosis, *, with_line: bool = False) -> str:
    """Return what happened in a step as a sentence, with names between backticks."""
    return _said(found, with_line=with_line).replace(_NAME, "`")


def parts(found: Diagnosis) -> Iterator[str | Code]:
    """Yield the same sentence, with the line, as text and code in turn."""
    for number, text in enumerate(_said(found, with_line=True).split(_NAME)):
        yield Code(text) if number % 2 else text


_NAME = "\0"  # the mark at the start and the end of a name


def _said(found: Diagnosis, *, with_line: bool) -> str:
    """Say what happened; a result in float32 only if a replay, or the op alone, has shown it."""
    bad = found.bad
    if found.happened and found.verdict in ("maths", "range"):
        said = _said(replace(found, happened=""), with_line=with_line)
        return f"{said.replace(' in the forward pass', '')}; {found.happened}"
    where = "" if bad is None else _where(bad, with_line)
    dtype = "its dtype" if bad is None or bad.output is None else bad.output.dtype
    wide = {None: "", True: "; in float32 it is finite", False: ", nor is it in float32"}
    in_float32 = wide[found.is_finite_in_float32]
    match found.verdict:
        case "none" if not found.happened:
            judged = "every op" if NO_END in found.notes else "every loss, and every gradient"
            return f"the step is finite: {judged}"
        case "scale":
            by = "" if found.scale is None else f" ({power(found.scale)})"
            return f"{where} overflowed {dtype}, because the loss scale{by} is too large"
        case "range" if bad is not None and _is_rounded(bad):
            return f"{where} is not finite, because its inputs were rounded before{in_float32}"
        case "range" if found.is_finite_in_float32:
            return f"{where} overflowed {dtype}{in_float32}"
        case "range":
            return f"{where} overflowed {dtype}; the op alone is finite in float32"
        case "maths":
            return f"{where} is not finite{in_float32 if dtype not in _WIDE else ''}"
        case "none" | "growth" | "optimizer":
            return found.happened
        case "data" if str(found.tensor).startswith(A_NUMBER):
            return f"{where} is given {found.tensor}"
        case "data":
            reader = f"; {where} reads it first" if where else ""
            return f"{_name(found.tensor)} was not finite before the step{reader}"
    return f"{where} is not finite, and the cause is not known" if where else NOT_KNOWN


NOT_KNOWN = "the cause is not known"
_WIDE = ("float32", "float64")


def _where(bad: BadOp, with_line: bool) -> str:
    line = bad.forward_line or bad.line
    at = ""
    if with_line and line is not None:
        at = f" ({_name(f'{PurePath(line.file).name}:{line.number}')})"
    name = "a cast" if bad.name == "_to_copy" else _name(bad.name or bad.op)
    if bad.op == "_to_copy" != bad.name:
        name = f"the cast for {name}"
    of = f" of {_name(bad.module)}" if bad.module else ""
    phase = "recomputation" if bad.phase == "recompute" else f"{bad.phase} pass"
    return f"{name}{of} in the {phase}{at}"


def _name(text: object) -> str:
    return f"{_NAME}{text or 'a tensor'}{_NAME}"


def _is_rounded(bad: BadOp) -> bool:
    """Return whether an earlier rounding, not the dtype of the op's result, is the cause."""
    if bad.output is not None and bad.output.dtype in _WIDE:
        return True
    if bad.op in ("sqrt", "rsqrt", "log", "log2", "log10"):
        return any(operand.low is not None and operand.low <= 0 for operand in bad.inputs)
    return bad.needs is None and any(operand.zeros for operand in bad.inputs)


def _facts(found: Diagnosis, bad: BadOp) -> Iterator[tuple[str, str]]:
    module = f" in {bad.module}" if bad.module else ""
    where = f"{module}, call {bad.call}" if bad.call else ""
    yield "op", f"{_op(bad)}{where}, {bad.phase}"
    if bad.rule:
        yield "rule", bad.rule
    if bad.line is not None:
        yield "line", line_text(bad.line)
    if bad.forward_op is not None:
        line = "" if bad.forward_line is None else f"  {line_text(bad.forward_line)}"
        yield "gradient", f"of {bad.forward_op}{line}"
    for text in found.source:
        yield "", text
    for operand in bad.inputs:
        yield "reads", _operand(operand)
    if bad.output is not None:
        yield "returns", _operand(bad.output)
    if bad.needs is not None and bad.limit is not None and bad.is_overflow and bad.output:
        factor = f"{bad.needs / bad.limit:.3g}"
        times = "" if factor == "1" else f": {factor} times as much"
        ends = f"{bad.output.dtype} ends at {_number(bad.limit)}{times}"
        yield "needs", f"{_number(bad.needs)}, {ends}"
    if found.scale is not None:
        yield "scale", power(found.scale)


def _ends(found: Diagnosis) -> Iterator[tuple[str, str]]:
    if found.ends:
        more = len(found.ends) - _MOST_ENDS
        ends = ", ".join(found.ends[:_MOST_ENDS]) + (f" and {more} more" if more > 0 else "")
        what = ends if found.ends == ("loss",) else f"gradients of {ends}"
        yield "ends in", what


def _cure(cure: Cure) -> list[str]:
    heads = {
        True: "cure (replayed: finite)",
        False: "tried, and not enough (replayed: not finite)",
        None: "cure (not tried)",
    }
    where = ", ".join(f"{short_path(e.file)}:{e.first}" for e in cure.edits)
    head = "no cure was found" if cure.kind == "look" else heads[cure.is_finite]
    head += f", in place of {where}:" if where else ":"
    return [head, *(f"  {text}" for text in (*cure.text.splitlines(), *shown(cure)))]


_STANDS = 1e-4  # the largest relative change of a loss that stands


def fall(losses: tuple[float, ...]) -> float:
    """Return by how much a loss fell; 0 if it is not known."""
    return losses[0] - losses[-1] if losses else 0.0


def stands(losses: tuple[float, ...]) -> bool:
    """Return whether a loss stays what it was, so that nothing is learned from the batch."""
    return bool(losses) and max(losses) - min(losses) <= _STANDS * abs(losses[0])


def shown(cure: Cure) -> Iterator[str]:
    """Yield what replays and trials of a cure have shown."""
    yield from cure.remarks
    if cure.trial:
        yield f"tried for {cure.trial}{_course(cure)}"


def _course(cure: Cure) -> str:
    """Describe the losses of a trial; a small step may be too long, so its rise says nothing."""
    if not cure.losses:
        return ""
    first, last = _number(cure.losses[0]), _number(cure.losses[-1])
    if stands(cure.losses):
        return f": the loss stays at {first}"
    if fall(cure.losses) > 0:
        return f": the loss falls from {first} to {last}"
    return "" if cure.has_small_steps else f": the loss rises from {first} to {last}"


MOST_OF_AN_ERROR = 160  # the number of characters of an error's message that are shown
_AROUND = 2  # the number of lines of source that are shown before and after the bad one


def short_error(error: BaseException) -> str:
    """Return the type and the message of an error, without a tensor or the like in full."""
    text = one_line(str(error))
    text = text if len(text) <= MOST_OF_AN_ERROR else f"{text[:MOST_OF_AN_ERROR]} ..."
    return f"{type(error).__name__}: {text}"


def source_of(bad: BadOp | None) -> tuple[str, ...]:
    """Return the lines around the line of an op; none if the file is unreadable or has changed."""
    line = None if bad is None else bad.line or bad.forward_line
    if line is None or linecache.getline(line.file, line.number).strip() != line.text:
        return ()
    first = max(1, line.number - _AROUND)
    lines = linecache.getlines(line.file)[first - 1 : line.number + _AROUND]
    shown = dedent("".join(lines)).splitlines()
    return tuple(
        f"{'>' if number == line.number else ' '} {number:>4}  {text}"
        for number, text in enumerate(shown, first)
    )


def _op(bad: BadOp) -> str:
    if bad.op == "_to_copy":
        return f"the cast for {bad.name}" if bad.name != "_to_copy" else "a cast"
    return bad.op if bad.name == bad.op else f"{bad.name} ({bad.op})"


def _operand(operand: Operand) -> str:
    shape = ", ".join(map(str, operand.shape))
    name = f"{operand.name} " if operand.name else ""
    parts = []
    size = math.prod(operand.shape)
    if "int" in operand.dtype and operand.low == operand.high and size > 1:
        return f"{name}{operand.dtype}[{shape}]: all {size} are {_number(operand.low or 0)}"
    if not size:
        parts.append("empty")
    if operand.low is not None and operand.high is not None:
        parts.append(f"{_number(operand.low)} to {_number(operand.high)}")
    for count, what in (
        (operand.nan, "NaN"),
        (operand.inf - operand.negative_inf, "inf"),
        (operand.negative_inf, "-inf"),
        (operand.zeros, "zero"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return f"{name}{operand.dtype}[{shape}]{': ' * bool(parts)}{', '.join(parts)}"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"
