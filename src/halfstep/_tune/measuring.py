"""A model with some islands: measured once, remembered, and told as the search wants it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from halfstep._autocast import Policy, keep
from halfstep._autocast.modules import Wrapped, unwrap
from halfstep._tune import plain, timing
from halfstep._tune.passes import (
    Bench,
    Comparison,
    Lowering,
    Reference,
    bench_for,
    compare,
    reference_of,
)
from halfstep._tune.progress import Watcher
from halfstep._tune.record import Measurements
from halfstep._tune.row import Row, origins, worst_of
from halfstep._tune.search import Found, Islands
from halfstep._tune.task import Task

ROUNDS = 5
"""So many steps of each kind are timed, after one in this process that is not."""

_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")  # what a rule of a policy can name


@dataclass
class Bencher:
    """Measures a task with islands.

    Attributes:
        task: The model and its loss.
        batches: What it is run on.
        lowering: How, in lower precision.
        known: The measurements that were made.
        watcher: Is told of each.
    """

    task: Task
    batches: Sequence[Any]
    lowering: Lowering
    known: Measurements
    watcher: Watcher
    _reference: tuple[int, Reference] | None = field(default=None, init=False)
    _is_warm: bool = field(default=False, init=False)

    def look(self, islands: Islands) -> Found:
        """Return what the search wants to know."""
        comparisons = self.comparisons(islands)
        rows = worst_of([comparison.rows for comparison in comparisons])
        is_loss_good = all(comparison.is_loss_good for comparison in comparisons)
        num_failing = sum(not row.passed for row in rows) + (not is_loss_good)
        if not num_failing:
            return Found(0, (), ())
        begin = dict.fromkeys(name for each in comparisons for name in origins(each.rows))
        outside = tuple(f"{op}@" for op in self.ops().get("", ()))
        if "" in begin or not (begin or is_loss_good):
            begin |= dict.fromkeys(outside)
        return Found(num_failing, tuple(begin), (*outside, *_suspects(rows)))

    def rows(self, islands: Islands) -> list[Row]:
        """Return the worst of each module over the batches."""
        return worst_of([comparison.rows for comparison in self.comparisons(islands)])

    def comparisons(self, islands: Islands) -> list[Comparison]:
        """Compare with float32, on each batch."""
        return [self._comparison(islands, number) for number in range(len(self.batches))]

    def _comparison(self, islands: Islands, number: int) -> Comparison:
        def measure() -> Any:
            reference = self._reference_of(number)
            with self._bench(islands, number) as bench:
                return plain.to_values(compare(bench, reference))

        what = f"batch {number + 1} of {len(self.batches)} with {_told(islands)}"
        values = self._once(["compare", sorted(islands), number], what, measure)
        return plain.from_values(values)

    def times(self, islands: Islands) -> dict[str, dict[str, float]]:
        """Return medians for ``"fp32"``, ``"lower"`` and, with some, ``"islands"``.

        In seconds, of a step on the first batch and of the forward pass of each module. The kinds
        take turns, so that what else the machine does meets all of them.
        """
        kinds: dict[str, tuple[Islands, bool]] = {"fp32": ((), False), "lower": ((), True)}
        if islands:
            kinds["islands"] = (islands, True)

        def measure() -> dict[str, dict[str, float]]:
            seconds = {}
            for kind, (kept, lowered) in kinds.items():
                scale = self._scale(kept)
                with self._bench(kept, 0) as bench:
                    seconds[kind] = timing.timed_step(bench, scale, lowered=lowered)
            return seconds

        rounds = []
        for number in range(ROUNDS):
            key = ["time", sorted(islands), number]
            if self.known.get(key) is None and not self._is_warm:
                self._is_warm = bool(measure())
            rounds.append(self._once(key, f"time, {number + 1} of {ROUNDS}", measure))
        return {kind: timing.medians([each[kind] for each in rounds]) for kind in kinds}

    def casts(self, islands: Islands) -> tuple[int, int]:
        """Return number and bytes of the casts in a step on the first batch."""

        def measure() -> Any:
            scale = self._scale(islands)
            with self._bench(islands, 0) as bench:
                return list(timing.casts_of(bench, scale))

        num, size = self._once(["casts", sorted(islands)], "casts", measure)
        return num, size

    def ops(self) -> dict[str, list[str]]:
        """Return the ops that rules could keep in float32, of modules with modules in them."""

        def measure() -> Any:
            scale = self._scale(())
            with self._bench((), 0) as bench:
                return timing.ops_of(bench, scale)

        ops: dict[str, list[str]] = self._once(["ops"], "ops", measure)
        containers = [row.module for row in self.rows(()) if not (row.is_leaf and row.module)]
        return {name: list(filter(_is_nameable, ops.get(name, []))) for name in containers}

    def _once(self, key: list[Any], what: str, measure: Callable[[], Any]) -> Any:
        if self.known.get(key) is None:
            self.watcher.measured(what, len(self.known))
            self.known.add(key, measure())
        return self.known.get(key)

    def _scale(self, islands: Islands) -> float:
        return self._comparison(islands, 0).scale

    def _reference_of(self, number: int) -> Reference:
        """Return what float32 computes; of one batch at a time, for it may be large."""
        if self._reference is None or self._reference[0] != number:
            self._reference = None
            with self._bench((), number) as bench:
                self._reference = number, reference_of(bench)
        return self._reference[1]

    @contextmanager
    def _bench(self, islands: Islands, number: int) -> Iterator[Bench]:
        modules = [each for each in islands if "@" not in each]
        ops = [each for each in islands if "@" in each]
        kept = keep(self.task.model, *modules) if modules else nullcontext()
        lowering = replace(self.lowering, policy=with_islands(self.lowering.policy, ops))
        with (
            _nameless_afterwards(self.task.model if ops else None),
            kept,
            bench_for(self.task, self.batches[number], lowering) as bench,
        ):
            yield bench


def module_of(island: str) -> str:
    """Return the name of the module that an island is, or an op is in."""
    return island.rpartition("@")[2]


def with_islands(policy: Policy, islands: Sequence[str]) -> Policy:
    """Return a policy with rules that keep modules, and ops in modules, in float32."""
    rules = [f"{each.removesuffix('@') if '@' in each else '@' + each}:fp32" for each in islands]
    return policy | "; ".join(rules) if rules else policy


@contextmanager
def _nameless_afterwards(model: nn.Module | None) -> Iterator[None]:
    """Let modules forget the names that a policy gives them for good."""
    modules = [] if model is None else [m for m in model.modules() if not isinstance(m, Wrapped)]
    try:
        yield
    finally:
        for module in modules:
            if isinstance(module, Wrapped):
                module._path = ""
                unwrap(module)


def _is_nameable(op: str) -> bool:
    """Say whether a policy can have a rule for an op."""
    try:
        Policy(()) | f"{op}:fp32"
    except ValueError:
        return False
    return True


def _suspects(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return what can be an island: leaves first, then what is around them, from the inside."""

    def order(row: Row) -> tuple[bool, int, float]:
        depth = 0 if row.is_leaf else -row.module.count(".")
        return not row.is_leaf, depth, -row.added

    return tuple(row.module for row in sorted(rows, key=order) if _NAME.fullmatch(row.module))


def _told(islands: Islands) -> str:
    if len(islands) > 3:
        return f"{len(islands)} islands"
    return ", ".join(islands) + " in fp32" if islands else "no islands"
