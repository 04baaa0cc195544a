"""Self-check of a model in lower precision, and the fewest float32 islands that it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from halfstep._autocast import Policy, settled_policy
from halfstep._common.numbers import listed, percent, power, things
from halfstep._common.text import aligned, status_line
from halfstep._tools.tune.measurer import Islands, IslandTrial, Measurer, module_of, with_islands
from halfstep._tools.tune.module_check import (
    OUTSIDE,
    BoundedError,
    Comparison,
    ModuleCheck,
    check_lines,
    origins,
    short_dtype,
)
from halfstep._tools.tune.passes import (
    LossFn,
    Lowering,
    Task,
    compare_step,
    reference_of,
    step_runner,
)

MANY_ZEROS = 0.05
MOST_OPS = 3  # the largest number of ops that may replace an island


def self_check(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    dtype: torch.dtype = torch.float16,
    policy: Policy | str = "standard",
    tolerance: float | None = None,
) -> SelfCheck:
    """Run a model forward and backward in float32 and in lower precision, and compare.

    The comparison covers the outputs of each module, their gradients, and the gradients of its
    parameters. The model, its gradients and all random numbers are restored bit for bit.
    docs/tune.md explains errors, tolerances and what a failure means.

    Args:
        model: The model, with float32 parameters. Training or evaluation mode stays as it is.
        batch: Without ``loss_fn``, the input of the model: a tensor, a tuple of arguments, or a
            dictionary of keyword arguments. With ``loss_fn``, anything that it takes.
        loss_fn: ``loss_fn(model, batch)`` calls the model and returns a scalar. For inference it
            returns outputs, detached if gradients do not matter. If None, the model is called.
        dtype: The lower precision, float16 or bfloat16.
        policy: The dtypes of ops: a :class:`halfstep.Policy`, or its text.
        tolerance: The largest permitted relative error of any module. None to derive tolerances
            from the dtype and the number of consecutive ops.

    Raises:
        TypeError: An argument, or the loss, has the wrong type.
        ValueError: ``dtype`` is not a lower precision, or a parameter is not float32.

    Sync: many.

    Example:
        >>> class Doubles(nn.Module):
        ...     def forward(self, x):
        ...         return x.exp2() / 2**20
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Hardtanh(17, 18), Doubles())
        >>> check = self_check(model, torch.randn(8, 4), policy="standard; exp2:leave")
        >>> check.passed, check.origins
        (False, ('2',))
    """
    lowering = lowering_of("self_check", dtype, policy, tolerance)
    with step_runner(Task(model, loss_fn), batch, lowering) as runner:
        return SelfCheck.of(compare_step(runner, reference_of(runner)), lowering)


def tune(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFn | None = None,
    dtype: torch.dtype = torch.float16,
    policy: Policy | str = "standard",
    tolerance: float | None = None,
) -> Tuned:
    """Find the smallest set of float32 islands that a model needs in lower precision.

    Each step is compared with float32, as in :func:`self_check`. The model, its gradients and all
    random numbers are restored bit for bit. docs/tune.md explains the method.

    Args:
        model: The model, with float32 parameters, preferably trained for a while.
        batches: Some batches, in the form that ``loss_fn`` takes.
        loss_fn: A function of the model and a batch, or None, as in :func:`self_check`.
        dtype: The lower precision, float16 or bfloat16.
        policy: The policy to which islands are added, or its text.
        tolerance: The largest permitted relative error of any module, as in :func:`self_check`.

    Raises:
        TypeError: An argument, or the loss, has the wrong type.
        ValueError: There is no batch, ``dtype`` is not a lower precision, or a parameter is not
            float32.

    Sync: many.

    Example:
        >>> class Doubles(nn.Module):
        ...     def forward(self, x):
        ...         return x.exp2() / 2**20
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Hardtanh(17, 18), Doubles())
        >>> tuned = tune(model, [torch.randn(8, 4)], None, policy="standard; exp2:leave")
        >>> print(tuned.policy)
        standard; exp2:leave; @2:fp32
    """
    task, lowering = Task(model, loss_fn), lowering_of("tune", dtype, policy, tolerance)
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        kind = type(batches).__name__
        raise TypeError(
            f"batches must be a list of batches, got {kind}: write [batch], list(loader)"
        )
    if not batches:
        raise ValueError("batches is empty: there is nothing to run the model on")
    with status_line() as show:
        measurer = Measurer(task, batches, lowering, show)
        islands = smallest(measurer.measure)
        islands = narrowed(measurer.measure, islands, measurer.ops() if islands else {})
        return _tuned(measurer, lowering, islands)


def lowering_of(
    asker: str, dtype: torch.dtype, policy: Policy | str, tolerance: float | None
) -> Lowering:
    """Return the settings of a user after checking them; raise ValueError or TypeError."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{asker}: dtype must be torch.float16 or torch.bfloat16, got {dtype!r}")
    if tolerance is not None:
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
            raise TypeError(
                f"{asker}: tolerance must be a number such as 0.01, or None, got {tolerance!r}"
            )
        if not 0 < tolerance < math.inf:
            raise ValueError(
                f"{asker}: tolerance must be above 0 and finite, such as 0.01, got {tolerance}"
            )
    return Lowering(dtype, settled_policy(policy), tolerance)


def _tuned(measurer: Measurer, lowering: Lowering, islands: Islands) -> Tuned:
    before, after = measurer.rows(()), measurer.rows(islands)
    order = {row.module: number for number, row in enumerate(before)}
    islands = tuple(sorted(islands, key=lambda each: order[module_of(each)]))
    return Tuned(
        policy=with_islands(lowering.policy, islands),
        islands=islands,
        effects=tuple(_effect(measurer, name, islands) for name in islands),
        is_met=measurer.measure(islands).num_failing == 0,
        dtype=lowering.dtype,
        rows=tuple(before),
        rows_after=tuple(after),
    )


def _effect(measurer: Measurer, name: str, islands: Islands) -> Island:
    others = tuple(other for other in islands if other != name)
    rows, rows_with = measurer.rows(others), measurer.rows(islands)
    module = module_of(name)
    row = next(row for row in rows if row.module == module)
    return Island(
        name=name,
        kind=row.kind if module else "",
        loses_to=_loses_to(row),
        error_without=_worst_error(rows),
        error_with=_worst_error(rows_with),
    )


# --- the search -----------------------------------------------------------------------------------


Measure: TypeAlias = Callable[[Islands], IslandTrial]
"""A function that measures the model with some islands and caches the results."""


def smallest(measure: Measure) -> Islands:
    """Return islands with which the fewest modules are out of bounds; each of them is needed.

    Modules where a failure begins become islands until no failure is left. These may be too many,
    since an island at an earlier module can cure a failure. Islands that are not needed are
    therefore dropped, several at once while that works. The search takes about two measurements
    for each needed island, and one if none is needed. The islands are in the order of discovery.
    """
    return pruned(measure, grown(measure))


def narrowed(measure: Measure, islands: Islands, ops: Mapping[str, Sequence[str]]) -> Islands:
    """Replace islands by a few of their ops, if that is enough.

    ``ops`` are the ops to try, by the name of the island.
    """
    most = measure(islands).num_failing
    for name in islands:
        others = tuple(other for other in islands if other != name)
        instead = others + tuple(f"{op}@{name}" for op in ops.get(name, ()))
        if instead != others and measure(instead).num_failing <= most:
            fewer = pruned(measure, instead)
            if len(fewer) <= len(others) + MOST_OPS:
                islands = fewer
    return islands


def grown(measure: Measure) -> Islands:
    """Return islands with which no module is out of bounds, or all possible islands."""
    islands: Islands = ()
    num_new = 1
    while (found := measure(islands)).num_failing:
        left = [name for name in found.suspects if name not in islands]
        if not left:
            break
        new = [name for name in left if name in found.origins]
        if not new:  # all origins are islands: try more and more suspects
            new, num_new = left[:num_new], 2 * num_new
        islands += tuple(new)
    return islands


def pruned(measure: Measure, islands: Islands) -> Islands:
    """Return islands without those that can be dropped while no more modules fail."""
    most = measure(islands).num_failing
    size = max(len(islands) // 2, 1)
    while islands:
        before = islands
        tried = islands[::-1]  # the last ones are the least likely to be needed
        for chunk in (tried[start : start + size] for start in range(0, len(tried), size)):
            rest = tuple(name for name in islands if name not in chunk)
            if measure(rest).num_failing <= most:
                islands = rest
        if size == 1 and islands == before:
            break
        size = max(size // 2, 1)
    return islands


# --- the results ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelfCheck:
    """The result of :func:`self_check`; its ``str()`` is a table.

    Attributes:
        rows: One row for each module that ran, worst first: modules where a failure begins, then
            those with the largest errors relative to their tolerances.
        origins: The names of the modules where failures begin: their inputs are within tolerance,
            and their outputs are not. ``""`` is the model's own ``forward``, or the loss. There
            are none if errors grow gradually and no single module is to blame.
        dtype: The lower precision.
        scale: The scale of the loss.
        loss: The loss in lower precision.
        loss32: The loss in float32.
    """

    rows: tuple[ModuleCheck, ...]
    origins: tuple[str, ...]
    dtype: torch.dtype
    scale: float
    loss: float
    loss32: float

    @classmethod
    def of(cls, comparison: Comparison, lowering: Lowering) -> SelfCheck:
        begin = origins(comparison.rows)
        if not comparison.is_loss_good and not begin:
            begin = [""]
        rows = sorted(comparison.rows, key=lambda row: (row.module not in begin, -row.severity))
        scale, loss, loss32 = comparison.scale, comparison.loss, comparison.loss32
        return cls(tuple(rows), tuple(begin), lowering.dtype, scale, loss, loss32)

    @property
    def passed(self) -> bool:
        """Whether all modules are within tolerance, and both losses are finite."""
        is_loss_good = math.isfinite(self.loss) and math.isfinite(self.loss32)
        return is_loss_good and all(row.passed for row in self.rows)

    def __str__(self) -> str:
        return "\n".join([self._summary(), "", *check_lines(self.rows, self.origins)])

    def _summary(self) -> str:
        num_failed = sum(not row.passed or row.module in self.origins for row in self.rows)
        name, num = short_dtype(self.dtype), things(len(self.rows), "module")
        scaled = f" (scaled by {power(self.scale)})" if self.scale != 1 else ""
        losses = f"loss {self.loss:.6g} in {name}{scaled}, {self.loss32:.6g} in fp32"
        if not any(row.output_gradient.size or row.parameters.size for row in self.rows):
            losses += "; nothing requires a gradient, so no gradients were compared"
        if self.passed:
            return f"passed: {num} in {name} agree with fp32; {losses}"
        begin = ", ".join(origin or OUTSIDE for origin in self.origins) or "no single module"
        differ = f"{num_failed} of {num} in {name} differ too much from fp32"
        return f"FAILED: {differ if num_failed else 'the loss'}; it begins in {begin}; {losses}"

    def __repr__(self) -> str:
        num = things(len(self.rows), "module")
        return f"<SelfCheck {'passed' if self.passed else 'FAILED'}, {num}>"


@dataclass(frozen=True)
class Island:
    """The effect of one island."""

    name: str  # as in :data:`Islands`
    kind: str  # the class of the module; empty for an op everywhere
    loses_to: str  # its problem in lower precision
    error_without: BoundedError  # the worst error of any module with all islands except this one
    error_with: BoundedError  # the worst error with all islands


@dataclass(frozen=True)
class Tuned:
    """The result of :func:`tune`; its ``str()`` is a report.

    Attributes:
        policy: The policy to use: the given one, with a rule for each island. Rules for modules
            need the model: ``autocast(policy=..., module=model)``.
        islands: The names of the modules, and ops in modules, that stay in float32.
        effects: The effect of each island.
        is_met: Whether all modules are within bounds with the islands.
        dtype: The lower precision.
        rows: The modules without islands, compared with float32 on their worst batches.
        rows_after: The same comparison with the islands.
    """

    policy: Policy
    islands: tuple[str, ...]
    effects: tuple[Island, ...]
    is_met: bool
    dtype: torch.dtype
    rows: tuple[ModuleCheck, ...]
    rows_after: tuple[ModuleCheck, ...]

    def table(self) -> str:
        """Return a table of the effect of each island, empty without islands."""
        if not self.effects:
            return ""
        in_lower = f"in {short_dtype(self.dtype)}"
        head = ("kept in fp32", "class", in_lower, "error without", "with")
        return "\n".join(aligned([head, *map(_cells, self.effects)], right=()))

    def __str__(self) -> str:
        parts = [self._verdict(), f"policy: {self.policy}", self.table()]
        return "\n".join(part for part in parts if part)

    def __repr__(self) -> str:
        low, kept = short_dtype(self.dtype), self._kept() or "nothing"
        return f"<Tuned {low}, {kept} in fp32, {self.policy}>"

    def _kept(self) -> str:
        """Return ``"2 modules and 1 op"``; empty if nothing has to stay in float32."""
        num_ops = sum("@" in name for name in self.islands)
        nums = {"module": len(self.islands) - num_ops, "op": num_ops}
        return listed([things(num, noun) for noun, num in nums.items() if num])

    def _verdict(self) -> str:
        low, num = short_dtype(self.dtype), things(len(self.rows), "module")
        if not self.is_met:
            failing = [row for row in self.rows_after if not row.passed]
            begin = listed([name or OUTSIDE for name in origins(self.rows_after)]) or OUTSIDE
            return (
                f"{low}: NOT within bounds, whatever stays in fp32: {len(failing)} of {num} "
                f"still fail, and it begins in {begin}; the policy helps all the same"
            )
        if not self.islands:
            return f"{low}: {num} within bounds, nothing has to stay in fp32"
        are = "is" if len(self.islands) == 1 else "are"
        return f"{low}: {self._kept()} in fp32 {are} needed and enough (the model has {num})"


def _loses_to(row: ModuleCheck) -> str:
    """Return the problem of a module: overflow, zeros that float32 does not have, or rounding."""
    parts = (row.output, row.input_gradient, row.parameters)
    if overflow := max(part.overflow_share for part in parts):
        return f"overflow, {percent(overflow)}"
    zeros = max(part.underflow_share for part in parts)
    return f"zeros, {percent(zeros)}" if zeros > MANY_ZEROS else "rounding"


def _worst_error(rows: Sequence[ModuleCheck]) -> BoundedError:
    return max(rows, key=lambda row: row.severity).worst


def _cells(island: Island) -> tuple[str, ...]:
    return (
        island.name.removesuffix("@"),
        island.kind or "-",
        island.loses_to,
        str(island.error_without),
        str(island.error_with),
    )
