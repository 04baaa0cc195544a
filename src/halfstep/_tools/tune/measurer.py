"""Measurements of a model with islands: errors and ops, each made once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from halfstep._autocast import Policy
from halfstep._autocast.access import named
from halfstep._common.formats import dtype_name
from halfstep._tools.trace.trace import trace
from halfstep._tools.tune.module_check import Comparison, ModuleCheck, origins, worst_of
from halfstep._tools.tune.passes import (
    Lowering,
    Reference,
    StepRunner,
    Task,
    compare_step,
    module_hooks,
    reference_of,
    step_runner,
)

_T = TypeVar("_T")


Islands: TypeAlias = tuple[str, ...]
"""Names of modules, ops in modules, and ops everywhere.

Examples: ``"blocks.0.mlp"``, ``"softmax@blocks.0.attn"``, ``"cross_entropy_loss@"``.
"""


@dataclass(frozen=True)
class IslandTrial:
    num_failing: int  # modules out of bounds, and 1 more if the loss is not finite
    origins: tuple[str, ...]  # the modules where failures begin; ops if outside of modules
    suspects: tuple[str, ...]  # all possible islands, in the order in which to try them


_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")  # the module names that a rule accepts


@dataclass
class Measurer:
    task: Task
    batches: Sequence[Any]
    lowering: Lowering
    show: Callable[[str], None]  # shows which measurement is being made
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False)
    _reference: tuple[int, Reference] | None = field(default=None, init=False)

    def measure(self, islands: Islands) -> IslandTrial:
        """Compare the model with some islands to float32, for the search."""
        comparisons, rows = self.comparisons(islands), self.rows(islands)
        is_loss_good = all(comparison.is_loss_good for comparison in comparisons)
        num_failing = sum(not row.passed for row in rows) + (not is_loss_good)
        if not num_failing:
            return IslandTrial(0, (), ())
        begin = dict.fromkeys(name for each in comparisons for name in origins(each.rows))
        outside = tuple(f"{op}@" for op in self.ops().get("", ()))
        if "" in begin or not (begin or is_loss_good):
            begin |= dict.fromkeys(outside)
        return IslandTrial(num_failing, tuple(begin), (*outside, *_suspects(rows)))

    def rows(self, islands: Islands) -> list[ModuleCheck]:
        """Return the worst check of each module over the batches."""
        return worst_of([comparison.rows for comparison in self.comparisons(islands)])

    def comparisons(self, islands: Islands) -> list[Comparison]:
        return [self._comparison(islands, number) for number in range(len(self.batches))]

    def _comparison(self, islands: Islands, number: int) -> Comparison:
        def measure() -> Comparison:
            reference = self._reference_of(number)
            with self._runner(islands, number) as runner:
                return compare_step(runner, reference)

        what = f"batch {number + 1} of {len(self.batches)} with {_islands_text(islands)}"
        return self._once(("compare", frozenset(islands), number), what, measure)

    def ops(self) -> dict[str, list[str]]:
        """Return the ops that rules could keep in float32, for modules that contain modules.

        These ops computed in lower precision in the forward pass. They are grouped by innermost
        module and have the names that rules use. Lowered ops outside of all modules are left out:
        a rule that keeps them in float32 would apply in all modules.
        """

        def measure() -> dict[str, list[str]]:
            scale = self._comparison((), 0).scale
            # Some modules run other ops if they have hooks, as they do in a comparison.
            hooks = module_hooks(self.task, lambda *_: None, lambda *_: None)
            with self._runner((), 0) as runner, trace(self.task.model) as traced:
                runner.step(hooks, lowered=True, scale=scale)
            found: dict[str, dict[str, None]] = {}
            for row in traced.ops:
                is_low = row.phase == "forward" and row.compute == dtype_name(self.lowering.dtype)
                if is_low and (row.module or row.action != "lower"):
                    found.setdefault(row.module, {})[row.name] = None
            return {module: list(names) for module, names in found.items()}

        ops = self._once(("ops",), "ops", measure)
        containers = [row.module for row in self.rows(()) if not (row.is_leaf and row.module)]
        return {name: list(filter(_is_nameable, ops.get(name, []))) for name in containers}

    def _once(self, key: tuple[Any, ...], what: str, measure: Callable[[], _T]) -> _T:
        if key not in self._known:
            self.show(f"{len(self._known)} measured: {what}")
            self._known[key] = measure()
        found: _T = self._known[key]
        return found

    def _reference_of(self, number: int) -> Reference:
        """Return the float32 values of a batch. Only one batch is cached: values may be large."""
        if self._reference is None or self._reference[0] != number:
            self._reference = None
            with self._runner((), number) as runner:
                self._reference = number, reference_of(runner)
        return self._reference[1]

    @contextmanager
    def _runner(self, islands: Islands, number: int) -> Iterator[StepRunner]:
        model, policy = self.task.model, with_islands(self.lowering.policy, islands)
        lowering = replace(self.lowering, policy=policy)
        step = step_runner(self.task, self.batches[number], lowering)
        with named(model, policy) if islands else nullcontext(), step as runner:
            yield runner


def module_of(island: str) -> str:
    """Return the name of the module that is the island or contains the op."""
    return island.rpartition("@")[2]


def with_islands(policy: Policy, islands: Sequence[str]) -> Policy:
    """Return a policy with rules that keep modules, and ops in modules, in float32."""
    rules = [f"{each.removesuffix('@') if '@' in each else '@' + each}:fp32" for each in islands]
    return policy | "; ".join(rules) if rules else policy


def _is_nameable(op: str) -> bool:
    """Return whether a policy accepts a rule for an op."""
    try:
        Policy(()) | f"{op}:fp32"
    except ValueError:
        return False
    return True


def _suspects(rows: Sequence[ModuleCheck]) -> tuple[str, ...]:
    """Return the possible islands: leaves first, then containers, innermost first."""

    def order(row: ModuleCheck) -> tuple[bool, int, float]:
        depth = 0 if row.is_leaf else -row.module.count(".")
        return not row.is_leaf, depth, -row.added

    return tuple(row.module for row in sorted(rows, key=order) if _NAME.fullmatch(row.module))


def _islands_text(islands: Islands) -> str:
    if len(islands) > 3:
        return f"{len(islands)} modules or ops in fp32"
    return ", ".join(islands) + " in fp32" if islands else "nothing in fp32"
