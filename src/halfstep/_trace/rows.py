"""One op that ran, as plain data, which is read without PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import Meta

from halfstep._common.json import Count

if TYPE_CHECKING:
    import torch

Phase = Literal["forward", "recompute", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward")

_DTYPES = r"bool|bits\d+(x\d+)?|q?u?int\d+(x\d+)?|b?float\d+(_[a-z0-9]+)*|complex\d+"
Dtype: TypeAlias = Annotated[str, Meta(pattern=f"^({_DTYPES})$")]
"""The name of a dtype of PyTorch, of this version or another, ``"bfloat16"``."""

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that an op reads or writes, as it was then.

    Attributes:
        storage: The number of its memory, which views share.
        version: How often that was written to in place.
        offset: Where in the memory it starts, in elements.
        shape: Its shape.
        dtype: The name of its dtype, ``"bfloat16"``.
        name: That of the parameter, or what it is the output of; empty if neither is known.
        requires_grad: Whether a gradient flows back to it.
        is_weight: Whether the memory is that of a parameter of the model, or of its cast.
        like: The number of the memory that it was modelled on (``empty_like``), if any.
    """

    storage: int
    version: int
    offset: int
    shape: tuple[Count, ...]
    dtype: Dtype
    name: str
    requires_grad: bool
    is_weight: bool
    like: int | None = None


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor copied to another floating dtype.

    Attributes:
        number: Unique among casts and rows, in the order they ran.
        source: What was cast.
        to: The dtype it was cast to.
        result: The number of the memory of the result.
        bytes: Read and written.
        by_hand: Whether the program asked for it, and no rule.
        gradient_of: In the backward pass: the number of the cast whose gradient it casts.
        seconds: How long it took.
    """

    number: int
    source: Value
    to: Dtype
    result: int
    bytes: Count
    by_hand: bool
    gradient_of: int | None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{short(self.source.dtype)}->{short(self.to)}"


@dataclass(frozen=True, slots=True)
class Row:
    """One ATen op, or casts that no op followed (``op="_to_copy"``).

    Attributes:
        number: Unique among casts and rows, in the order they ran.
        module: The path of the module, empty outside the model.
        call: The number of the call of that module in which it ran, from 0.
        phase: ``"recompute"`` is the forward pass again, for activation checkpointing.
        op: The name of the op, ``"addmm"``.
        inputs: Its tensors, before the casts in ``casts``.
        compute: The widest floating dtype among inputs (after casts) and first output. What a
            kernel sums in may be wider still.
        outputs: What it returned; what it wrote to if it returned nothing.
        rule: The rule that decided, ``"linear:lower"``; in the backward pass the one that decided
            in the forward pass. None if no rule of halfstep did.
        ruled_op: The op that the rule was asked for, ``"linear"``.
        autocast: The lower precision of autocast where it ran, None where that was off.
        cache: Whether autocast kept casts of weights there.
        casts: Made for this op.
        device: The device type.
        seconds: How long it took, without the casts.
    """

    number: int
    module: str
    call: int
    phase: Phase
    op: str
    inputs: tuple[Value, ...]
    rule: str | None
    ruled_op: str | None
    autocast: str | None
    cache: bool
    device: str
    compute: str
    outputs: tuple[Value, ...]
    casts: tuple[Cast, ...]
    seconds: float

    @property
    def is_cast_only(self) -> bool:
        """Whether nothing was computed."""
        return not self.compute

    @property
    def name(self) -> str:
        """What a rule about it names."""
        return self.ruled_op or self.op

    @property
    def action(self) -> str | None:
        """What its rule says, ``"lower"``."""
        return self.rule.rpartition(":")[2] if self.rule else None

    @property
    def output(self) -> str:
        """The dtype of the first output; of casts alone, what they give."""
        if self.outputs:
            return self.outputs[0].dtype
        return self.casts[-1].to if self.casts else ""

    @property
    def cast_bytes(self) -> int:
        """Read and written by its casts."""
        return sum(cast.bytes for cast in self.casts)

    @property
    def cast_seconds(self) -> float:
        """How long its casts took."""
        return sum(cast.seconds for cast in self.casts)

    def plain(self) -> dict[str, Any]:
        """Return one line of a data frame."""
        return {
            "module": self.module,
            "call": self.call,
            "phase": self.phase,
            "op": self.op,
            "input_dtypes": [value.dtype for value in self.inputs],
            "input_shapes": [list(value.shape) for value in self.inputs],
            "compute_dtype": self.compute,
            "output_dtype": self.output,
            "output_shapes": [list(value.shape) for value in self.outputs],
            "rule": self.rule,
            "autocast": self.autocast,
            "casts": [
                {
                    "from": cast.source.dtype,
                    "to": cast.to,
                    "bytes": cast.bytes,
                    "source": cast.source.name,
                    "by_hand": cast.by_hand,
                    "seconds": cast.seconds,
                }
                for cast in self.casts
            ],
            "num_casts": len(self.casts),
            "cast_bytes": self.cast_bytes,
            "device": self.device,
            "seconds": self.seconds,
            "cast_seconds": self.cast_seconds,
        }


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return items by what ``key`` gives for them, in the order in which they come."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def pattern(module: str) -> str:
    """Return the glob that a path shares with those that differ from it in an index only."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def folded(modules: Iterable[str]) -> list[str]:
    """Return paths, with one glob for those that differ in an index only."""
    alike = grouped(dict.fromkeys(modules), pattern)
    return [glob if len(paths) > 1 else paths[0] for glob, paths in alike.items()]


# --- dtypes by name -------------------------------------------------------------------------------


def short(dtype: str) -> str:
    """Return ``"bf16"`` for ``"bfloat16"``."""
    return _SHORT.get(dtype, dtype)


def is_float(dtype: str) -> bool:
    """Say whether a dtype is real floating point."""
    return dtype.startswith(("float", "bfloat"))


def is_lower(dtype: str) -> bool:
    """Say whether a dtype is one that autocast lowers to."""
    return dtype in ("float16", "bfloat16")


def itemsize(dtype: str) -> int:
    """Return the bytes of one element."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1  # "bool"; several of "int4" share a byte


def cast_bytes(shape: tuple[int, ...], source: str, to: str) -> int:
    """Return the bytes that a cast reads and writes."""
    return math.prod(shape) * (itemsize(source) + itemsize(to))


def promoted(values: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Return the dtype in which PyTorch computes with floating tensors of these dtypes and shapes.

    Empty if none of them is floating. A tensor without dimensions does not widen one with some.
    PyTorch promotes no float8; the ops that take one with others compute in the wider dtype.
    """
    floats = [(dtype, shape) for dtype, shape in values if is_float(dtype)]
    deciding = [dtype for dtype, shape in floats if shape] or [dtype for dtype, _ in floats]
    if not deciding:
        return ""
    widest = max(map(itemsize, deciding))
    found = {dtype for dtype in deciding if itemsize(dtype) == widest}
    return found.pop() if len(found) == 1 else "float32"  # float16 and bfloat16


def computed_in(inputs: Iterable[Value], outputs: tuple[Value, ...]) -> str:
    """Return the widest floating dtype among inputs and first output, else any dtype there is.

    Empty if there is no tensor at all.
    """
    inputs = tuple(inputs)
    given = promoted((value.dtype, value.shape) for value in inputs)
    # A sum without dimensions is computed in its own dtype all the same.
    widest = promoted((dtype, (1,)) for dtype in (given, *(v.dtype for v in outputs[:1])))
    return widest or next((value.dtype for value in (*outputs, *inputs)), "")


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
