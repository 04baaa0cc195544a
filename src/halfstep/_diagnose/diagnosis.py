"""What is known of a step that went bad, as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, Self

import torch

from halfstep._common.json import Count, Finite, Positive, decoded, to_plain
from halfstep._diagnose import wording
from halfstep._trace.rows import Phase

Verdict = Literal["none", "scale", "range", "maths", "data", "unknown"]
"""Why: see :class:`Diagnosis`."""

CureKind = Literal["policy", "scale", "dtype", "code", "data"]


@dataclass(frozen=True)
class Line:
    """A line of the user's code.

    Attributes:
        file: The path of the file.
        number: Which line, from 1.
        function: The name of the function it is in.
        text: The line itself, without the spaces around it.
    """

    file: str
    number: Count
    function: str
    text: str


@dataclass(frozen=True)
class Operand:
    """A tensor that an op read or returned.

    Attributes:
        name: That of the parameter or buffer; empty if it is none.
        dtype: The name of its dtype, ``"float16"``.
        shape: Its shape.
        low: The smallest finite value, None if there is none.
        high: The largest finite value.
        nan: How many entries are NaN.
        inf: How many are inf or -inf.
        zeros: How many are zero.
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    low: Finite | None
    high: Finite | None
    nan: Count
    inf: Count
    zeros: Count


@dataclass(frozen=True)
class BadOp:
    """The first op whose inputs were finite and whose output is not.

    Attributes:
        op: The name of the ATen op, ``"addmm"``; ``"_to_copy"`` for a cast.
        name: What a policy calls it: the op that a rule was asked for, ``"linear"``.
        module: The path of its module; empty in the model's own ``forward`` and outside of it.
        call: The number of the call of that module in which it ran, from 0.
        phase: When it ran; ``"recompute"`` is the forward pass again, for checkpointing.
        rule: The text of the policy's rule that decided, if one did.
        line: The line of code that called it; in the backward pass only in a backward written in
            Python.
        forward_op: In the backward pass: the op whose gradient it computes.
        forward_line: The line that called that.
        inputs: What it read, before it wrote to any of it.
        output: What it returned.
        needs: The largest magnitude of the result if computed in float64; None if that is not
            finite either, or the op cannot be run so.
        limit: The largest number of the dtype of the result.
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
    def is_beyond_its_dtype(self) -> bool:
        """Whether a float32 would hold what it returns, and its dtype does not."""
        if self.needs is None or self.limit is None:
            return False
        return self.limit < self.needs < torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Cure:
    """What to change.

    Attributes:
        kind: A policy, a scale, another dtype, an edit of the code, or of the data.
        text: What to paste, or to do.
        is_finite: Whether a replay of the step with it was finite; None if it was not replayed.
        policy: The text of the policy.
        scale: The scale.
        dtype: The name of the lower precision.
    """

    kind: CureKind
    text: str
    is_finite: bool | None = None
    policy: str | None = None
    scale: float | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Flush:
    """An op that rounds values that are not zero to zero.

    Attributes:
        op: The name of the ATen op.
        module: The path of its module.
        phase: When it runs.
        dtype: What it returns, ``"float16"``.
        line: The line that called it; in the backward pass, the line of the op whose gradient it
            computes.
        values: How many of its results are not zero if computed in float32.
        flushed: How many of them it returns as zero.
        at_scales: In the backward pass of a scaled loss: how many would be, at other scales.
    """

    op: str
    module: str
    phase: Phase
    dtype: str
    line: Line | None
    values: Count
    flushed: Count
    at_scales: tuple[tuple[float, Count], ...] = ()

    @property
    def share(self) -> float:
        """The share of values that is flushed, 0 to 1."""
        return self.flushed / self.values if self.values else 0.0


@dataclass(frozen=True)
class Diagnosis:
    """The answer of :func:`halfstep.diagnose`; ``str()`` of it is text to read.

    Attributes:
        verdict: ``"none"``: the step is finite. ``"scale"``: a gradient overflows, and a smaller
            loss scale cures it. ``"range"``: the value is finite in float32, and the dtype cannot
            hold it. ``"maths"``: it is not finite in float32 either. ``"data"``: a parameter, a
            buffer or the batch was bad before the step. ``"unknown"``: see the notes.
        bad: The first bad op. For ``"data"``, the op that read the bad tensor first.
        tensor: For ``"data"``: what is bad.
        ends: What went bad in the end: ``"loss"``, or the parameters whose gradients did.
        scale: The scale of the loss; None without one.
        cure: What to change; None if nothing was found.
        underflow: The ops that flush values to zero, those that flush most of them first.
        notes: What else there is to know, a line each.
        num_replays: How often the step was run.
        seconds: How long that took.
        rank: The rank that it comes from.
        others: What other ranks have found.

    Example:
        >>> import halfstep
        >>> x = torch.tensor([1.0, 0.0], requires_grad=True)
        >>> found = halfstep.diagnose(lambda: torch.log(x).sum().backward())
        >>> found.verdict, found.bad.op, found.cure.text
        ('maths', 'log', 'torch.log((...).clamp_min(1e-06))')
    """

    verdict: Verdict
    bad: BadOp | None = None
    tensor: str | None = None
    ends: tuple[str, ...] = ()
    scale: float | None = None
    cure: Cure | None = None
    underflow: tuple[Flush, ...] = ()
    notes: tuple[str, ...] = ()
    num_replays: Count = 0
    seconds: float = 0.0
    rank: Count = 0
    others: tuple[Diagnosis, ...] = ()

    def __str__(self) -> str:
        return wording.text(self)

    def to_json(self) -> str:
        """Return everything as text that :meth:`from_json` reads."""
        return json.dumps(to_plain(asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the diagnosis that :meth:`to_json` wrote.

        Raises:
            ValueError: It is no JSON, or something is missing or of another type.
        """
        return decoded(cls, text)
