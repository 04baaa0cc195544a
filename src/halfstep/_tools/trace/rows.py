"""Rows of a trace: ops as plain data, and their table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeVar

from halfstep._common.numbers import things
from halfstep._common.text import TableLine, aligned

Phase = Literal["forward", "recompute", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward")

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that an op reads or writes, as it was at that time.

    Attributes:
        storage: The number of its storage, which views share.
        shape: Its shape.
        dtype: The name of its dtype, ``"bfloat16"``.
        name: The name of the parameter, or of the op that computed it; empty if unknown.
    """

    storage: int
    shape: tuple[int, ...]
    dtype: str
    name: str


@dataclass(frozen=True, slots=True)
class Cast:
    """A copy of a tensor in another floating dtype.

    Attributes:
        source: The tensor that was cast.
        to: The dtype it was cast to.
        result: The number of the storage of the result.
        bytes: The bytes read and written.
        by_hand: Whether the program made the cast, rather than a rule.
    """

    source: Value
    to: str
    result: int
    bytes: int
    by_hand: bool

    def __str__(self) -> str:
        return f"{short(self.source.dtype)}->{short(self.to)}"


@dataclass(frozen=True, slots=True)
class Row:
    """An ATen op that ran, or casts without a subsequent op (``op="_to_copy"``).

    Attributes:
        module: The path of the module, empty outside the model.
        call: The number of the call of that module in which it ran, from 1; 0 outside of modules.
        phase: ``"recompute"`` is a repeated forward pass, for activation checkpointing.
        op: The name of the op, ``"addmm"``.
        inputs: Its tensors, before the casts in ``casts``.
        compute: The widest floating dtype among inputs (after casts) and first output. A kernel
            may accumulate in a wider one.
        outputs: The tensors it returned; those it wrote to if it returned none.
        rule: The rule that decided, ``"linear:lower"``; in the backward pass the one that decided
            in the forward pass. None if no rule of halfstep did.
        ruled_op: The op that the rule was looked up for, ``"linear"``.
        autocast: The lower precision of autocast for the op, None if autocast was off.
        casts: The casts made for this op.
        device: The device type.
    """

    module: str
    call: int
    phase: Phase
    op: str
    inputs: tuple[Value, ...]
    rule: str | None
    ruled_op: str | None
    autocast: str | None
    device: str
    compute: str
    outputs: tuple[Value, ...]
    casts: tuple[Cast, ...]

    @property
    def is_cast_only(self) -> bool:
        """Whether the row contains only casts."""
        return not self.compute

    @property
    def name(self) -> str:
        """The name of the op in a rule."""
        return self.ruled_op or self.op

    @property
    def action(self) -> str | None:
        """The action of the op's own rule, ``"lower"``; that of an island is not its own."""
        return self.rule.rpartition(":")[2] if self.rule and self.ruled_op else None

    @property
    def output(self) -> str:
        """The dtype of the first output; for casts alone, the dtype they cast to."""
        if self.outputs:
            return self.outputs[0].dtype
        return self.casts[-1].to if self.casts else ""

    @property
    def cast_bytes(self) -> int:
        """The bytes that its casts read and write."""
        return sum(cast.bytes for cast in self.casts)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return items grouped by key, in order of first appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# --- dtypes by name -------------------------------------------------------------------------------


def short(dtype: str) -> str:
    """Return ``"bf16"`` for ``"bfloat16"``."""
    return _SHORT.get(dtype, dtype)


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1  # "bool"; several of "int4" share a byte


def cast_bytes(shape: tuple[int, ...], source: str, to: str) -> int:
    return math.prod(shape) * (itemsize(source) + itemsize(to))


def promoted(values: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Return the dtype in which PyTorch computes with floating tensors of these dtypes and shapes.

    Empty if none is floating. A 0-dim tensor does not widen one with dimensions. PyTorch does not
    promote float8; ops that take it together with others compute in the wider dtype.
    """
    floats = [(dtype, shape) for dtype, shape in values if is_float(dtype)]
    deciding = [dtype for dtype, shape in floats if shape] or [dtype for dtype, _ in floats]
    if not deciding:
        return ""
    widest = max(map(itemsize, deciding))
    found = {dtype for dtype in deciding if itemsize(dtype) == widest}
    return found.pop() if len(found) == 1 else "float32"  # float16 and bfloat16


def computed_in(inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> str:
    """Return the widest floating dtype among inputs and first output, otherwise any dtype.

    Empty without tensors.
    """
    given = promoted((value.dtype, value.shape) for value in inputs)
    # A 0-dim output still counts, such as the result of a sum.
    widest = promoted((dtype, (1,)) for dtype in (given, *(v.dtype for v in outputs[:1])))
    return widest or next((value.dtype for value in (*outputs, *inputs)), "")


# --- text of cells --------------------------------------------------------------------------------


def cut(name: str, longest: int = 32) -> str:
    """Shorten the name of an op or rule by removing its middle."""
    half = longest // 2 - 1
    return name if len(name) <= longest else f"{name[:half]}..{name[-half:]}"


def runs_text(words: Iterable[str]) -> str:
    """Return words with repetitions counted: ``"2 bf16, int64"``."""
    runs = [(word, len(list(run))) for word, run in groupby(map(short, words))]
    return ", ".join(word if num == 1 else f"{num} {word}" for word, num in runs)


def bytes_text(num: float) -> str:
    """Return ``"1.5 KiB"`` for 1536."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num) < 1024:
            return f"{num:.0f} B" if unit == "B" else f"{num:.1f} {unit}"
        num /= 1024
    return f"{num:.1f} GiB"


def pattern(module: str) -> str:
    """Return a path with ``*`` for each index in it."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def glob_of(modules: Iterable[str]) -> str:
    """Return paths of one pattern with ``*`` for each index that differs: ``blocks.*.mlp.0``."""
    columns = zip(*(path.split(".") for path in modules), strict=True)
    return ".".join(parts[0] if len({*parts}) == 1 else "*" for parts in columns)


# --- the table ------------------------------------------------------------------------------------

_TABLE_HEAD = ("op", "n", "inputs", "compute", "rule", "bytes")
_LONGEST_RULE = 26


def table_of(rows: Sequence[Row], footer: Iterable[str]) -> str:
    lines: list[TableLine] = [_TABLE_HEAD]
    by_phase = grouped(rows, lambda row: row.phase)
    for phase in filter(by_phase.get, PHASES):
        lines += _phase_lines(phase, by_phase[phase])
    return "\n".join([*aligned(lines, indent=4), f"total: {total_text(rows)}", *footer])


def _phase_lines(phase: Phase, rows: Sequence[Row]) -> Iterator[TableLine]:
    """Yield the ops of a phase by module; equal ops share a line, equal modules a block."""
    yield f"{phase}: {total_text(rows)}"
    modules = grouped(rows, lambda row: row.module)
    for alike in grouped(modules.items(), _content).values():
        paths = [path for path, _ in alike]
        title = glob_of(paths) or "(in no submodule)"
        yield f"  {title}" + (f"  x{len(paths)}" if len(paths) > 1 else "")
        for same in grouped((row for _, rows in alike for row in rows), _alike).values():
            yield from _cells(same)


def _content(module: tuple[str, list[Row]]) -> Hashable:
    """Return a key that is equal for modules that run the same ops and differ only in an index."""
    path, rows = module
    return pattern(path), tuple((key, len(same)) for key, same in grouped(rows, _alike).items())


def _alike(row: Row) -> Hashable:
    inputs = tuple(value.dtype for value in row.inputs)
    casts = tuple(sorted(map(str, row.casts)))
    return row.op, inputs, row.compute, row.output, row.rule, casts, _by_hand(row)


def _by_hand(row: Row) -> bool:
    return any(cast.by_hand for cast in row.casts)


def _cells(rows: Sequence[Row]) -> Iterator[TableLine]:
    """Yield a line for equal rows, and one for each kind of cast made for them."""
    row = rows[0]
    rule = cut(row.rule, _LONGEST_RULE) if row.rule else "by hand" if _by_hand(row) else "-"
    dtypes = dict.fromkeys((row.compute, row.output or row.compute))
    computes = "->".join(map(short, dtypes))
    inputs = runs_text(sorted(value.dtype for value in row.inputs))
    if not row.is_cast_only:
        yield cut(row.op), str(len(rows)), inputs, computes, rule, "-"
    for text, casts in grouped((cast for row in rows for cast in row.casts), str).items():
        size = bytes_text(sum(cast.bytes for cast in casts))
        name, by = (f"cast {text}", rule) if row.is_cast_only else (f"  cast {text}", "-")
        yield name, str(len(casts)), "-", "-", by, size


def total_text(rows: Sequence[Row]) -> str:
    num_ops = sum(not row.is_cast_only for row in rows)
    casts = things(sum(len(row.casts) for row in rows), "cast")
    moved = bytes_text(sum(row.cast_bytes for row in rows))
    return f"{things(num_ops, 'op')}, {casts} of {moved}"
