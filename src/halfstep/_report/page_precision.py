"""The precision map: which share of the ops and of the time ran in which dtype, by module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halfstep._trace.recording import Recording
from halfstep._trace.rows import Row, grouped, short

MOST_MODULES = 40
CASTS = "casts"
"""What stands in for a dtype where the time goes into casts."""


@dataclass(frozen=True)
class Part:
    """What ran in one dtype.

    Attributes:
        dtype: Its short name, or ``"casts"``.
        ops: Number of ops.
        seconds: Their time.
    """

    dtype: str
    ops: int
    seconds: float


@dataclass(frozen=True)
class ModulePrecision:
    """What ran in a module and the modules inside it.

    Attributes:
        name: Path of the module; empty for all together.
        parts: By dtype.
    """

    name: str
    parts: tuple[Part, ...]

    @property
    def ops(self) -> int:
        """Number of ops."""
        return sum(part.ops for part in self.parts)

    @property
    def seconds(self) -> float:
        """Time of all."""
        return sum(part.seconds for part in self.parts)

    def share_of_ops(self, dtype: str) -> float:
        """Return the share of the ops that ran in a dtype."""
        return sum(p.ops for p in self.parts if p.dtype == dtype) / max(1, self.ops)

    def share_of_time(self, dtype: str) -> float:
        """Return the share of the time that went into a dtype."""
        seconds = sum(p.seconds for p in self.parts if p.dtype == dtype)
        return seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class PrecisionMap:
    """The whole map.

    Attributes:
        dtypes: All of them, most time first.
        total: All modules together.
        modules: In the order in which they ran.
        environment: What was traced: versions, device, policy.
    """

    dtypes: list[str]
    total: ModulePrecision
    modules: list[ModulePrecision]
    environment: dict[str, str]


def precision_map(trace: Recording) -> PrecisionMap:
    """Return what a trace says of time and ops by dtype."""
    total = _precision("", trace.ops)
    depth = _depth([row.module for row in trace.ops])
    modules = grouped(trace.ops, lambda row: ".".join(row.module.split(".")[:depth]))
    return PrecisionMap(
        [part.dtype for part in sorted(total.parts, key=lambda p: (-p.seconds, -p.ops))],
        total,
        [_precision(name, rows) for name, rows in modules.items()],
        trace.environment,
    )


def _depth(paths: Sequence[str]) -> int:
    """Return how many parts of the paths to show, so that there are not too many modules."""
    deepest = max((path.count(".") + 1 for path in paths), default=1)
    for depth in range(deepest, 1, -1):
        if len({".".join(path.split(".")[:depth]) for path in paths}) <= MOST_MODULES:
            return depth
    return 1


def _precision(name: str, rows: Iterable[Row]) -> ModulePrecision:
    ops: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for row in rows:
        if row.cast_seconds or row.is_cast_only:
            seconds[CASTS] = seconds.get(CASTS, 0.0) + row.cast_seconds
        if not row.is_cast_only:
            dtype = short(row.compute)
            ops[dtype] = ops.get(dtype, 0) + 1
            seconds[dtype] = seconds.get(dtype, 0.0) + row.seconds
        if row.casts:
            ops[CASTS] = ops.get(CASTS, 0) + len(row.casts)
    dtypes = dict.fromkeys((*ops, *seconds))
    return ModulePrecision(
        name, tuple(Part(dtype, ops.get(dtype, 0), seconds.get(dtype, 0.0)) for dtype in dtypes)
    )
