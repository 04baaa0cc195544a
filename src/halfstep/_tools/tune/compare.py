"""Comparison of two versions of a model: where they first drift apart, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._common.machine import RandomStates, accelerators
from halfstep._common.module_names import replicated, without_wrappers
from halfstep._common.nested import tensors_in
from halfstep._common.numbers import listed, things
from halfstep._common.patches import Patches, TopLevelCalls, not_compiled
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch import modes
from halfstep._pytorch.compiler import eager
from halfstep._pytorch.devices import widest_float
from halfstep._tools.trace.rows import short
from halfstep._tools.tune.module_check import (
    Difference,
    ModuleCheck,
    check_lines,
    differences_of,
    is_leaf,
    module_name,
    origins,
)
from halfstep._tools.tune.passes import TensorCopies, called_with, module_hooks, restored
from halfstep._tools.tune.tokens import (
    LogProbs,
    Tokens,
    log_probs,
    pairs,
    require_same_tokens,
    tokens_of,
)
from halfstep._tools.tune.tolerances import Depths, require_tolerance, tolerance_between


def compare(
    a: Callable[..., Any],
    b: Callable[..., Any],
    batch: Any,
    batch_b: Any = None,
    *,
    tolerance: float | None = None,
) -> Drift:
    """Run two versions of a model on one batch, and find where they first drift apart.

    Versions may differ in dtype, policy, attention, batch shape, padding, cache, or class. Each is
    a model, or a function that calls one in any way: under its own autocast, token by token,
    sequence by sequence. Only forward passes are compared. Afterwards, weights, buffers, gradients
    and random numbers are restored. docs/compare.md explains the method.

    Args:
        a: The reference of all errors, such as the trainer's version.
        b: The other version, such as the rollout's.
        batch: The input of both: a tensor, a tuple of arguments, or a dictionary of keyword
            arguments.
        batch_b: A batch for ``b`` with the same tokens and other padding. None for the same batch.
        tolerance: The largest permitted relative error of any module. None to derive tolerances
            from the coarser dtype and the number of consecutive ops.

    Raises:
        TypeError: A version cannot be called, or the tolerance is not a number.
        ValueError: The batches have different tokens, the tolerance is not above 0 and finite, or
            the versions have no module in common.

    Sync: several for each module.

    Example:
        >>> from halfstep import autocast
        >>> _ = torch.manual_seed(0)
        >>> model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(8, 4)
        >>> def rollout(x):
        ...     with torch.no_grad(), autocast("cpu", torch.bfloat16):
        ...         return model(x)
        >>> drift = compare(model, rollout, batch)
        >>> drift.passed, drift.first
        (True, '0')
    """
    _require_valid(a, b, tolerance)
    tokens_a = tokens_of(batch)
    tokens_b = tokens_a if batch_b is None else tokens_of(batch_b)
    require_same_tokens(tokens_a, tokens_b)
    names: Names = {}
    of_a = run(a, batch, names)
    of_b = run(b, batch if batch_b is None else batch_b, names)
    rows = list(_rows(of_a, of_b, tokens_a, tokens_b, tolerance))
    if not rows:
        raise ValueError(
            "compare: the versions have no module in common that returns tensors of the same "
            "shape: a and b must call modules of the same names, or with the same weights"
        )
    names_of_origins = set(origins(rows))
    begin = [row.module for row in rows if row.module in names_of_origins]  # in the order of ``a``
    first = next((row.module for row in rows if row.ulps.largest), None)
    rows.sort(key=lambda row: (row.module not in begin, -row.severity))
    logs = log_probs(of_a.output, of_b.output, tokens_a, tokens_b)
    return Drift(tuple(rows), tuple(begin), first, logs)


class Ulps(NamedTuple):
    """The differences of entries, in units in the last place of a dtype.

    The unit is taken at the entry, or at the root mean square of its tensor if that is larger,
    since an entry near zero is usually a sum of larger terms.

    Attributes:
        median: The median over the entries.
        largest: The largest difference.
        dtype: The dtype.
    """

    median: float
    largest: float
    dtype: torch.dtype

    def __str__(self) -> str:
        name = short(dtype_name(self.dtype))
        return f"{self.median:.2g}, at most {self.largest:.2g}, {name}"


@dataclass(frozen=True)
class ModulePair(ModuleCheck):
    """The check of a module in two versions; errors are those of ``b`` relative to ``a``.

    Attributes:
        ulps: The differences of its outputs in units in the last place of the coarser dtype.
    """

    ulps: Ulps


@dataclass(frozen=True)
class Drift:
    """The result of :func:`compare`; its ``str()`` is a table.

    Attributes:
        rows: The modules that ran in both versions, worst first: those where the versions drift
            apart, then those with the largest errors relative to their tolerances.
        origins: The names of the modules where they drift apart, in order: their inputs are within
            tolerance, and their outputs are not. ``""`` is the model's own ``forward``.
        first: The first module whose outputs are not equal bit for bit. None if all are equal.
        log_probs: The drift of the log-probabilities of tokens, None unless the output has logits
            for the tokens of the batch.
    """

    rows: tuple[ModulePair, ...]
    origins: tuple[str, ...]
    first: str | None
    log_probs: LogProbs | None

    @property
    def passed(self) -> bool:
        """Whether all modules are within tolerance."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        ulps = {row.module: str(row.ulps) for row in self.rows}
        table = check_lines(self.rows, self.origins, more={"units in the last place": ulps})
        logs = [str(self.log_probs)] if self.log_probs else []
        return "\n".join([self._summary(), *logs, "", *table])

    def _summary(self) -> str:
        num = things(len(self.rows), "module")
        if self.first is None:
            return f"passed: {num} are equal in a and b, bit for bit"
        first = next(row for row in self.rows if row.module == self.first)
        differ = f"the first difference is in {module_name(first.module)}, {first.ulps} "
        differ += "units in the last place"
        if self.passed:
            return f"passed: {num} agree in a and b; {differ}"
        num_failed = sum(not row.passed for row in self.rows)
        begin = listed([module_name(name) for name in self.origins]) or "no single module"
        return f"FAILED: {num_failed} of {num} drift apart; it begins in {begin}; {differ}"

    def __repr__(self) -> str:
        result = "passed" if self.passed else "FAILED"
        return f"<Drift {result}, {things(len(self.rows), 'module')}>"


def _rows(
    a: Version,
    b: Version,
    tokens_a: Tokens | None,
    tokens_b: Tokens | None,
    tolerance: float | None,
) -> Iterator[ModulePair]:
    """Yield the modules whose outputs can be compared, in the order of ``a``."""
    for name, name_b in _paired(a, b):
        seen_a, seen_b = a.modules[name], b.modules[name_b]
        outputs = list(pairs(seen_a.outputs, seen_b.outputs, tokens_a, tokens_b))
        if not any(wanted.numel() for wanted, _ in outputs):
            continue
        inputs = pairs(seen_a.inputs, seen_b.inputs, tokens_a, tokens_b)
        dtype = coarser(seen_a.dtype, seen_b.dtype)
        depth = max(seen_a.depth, seen_b.depth)
        tensors = (*(wanted for wanted, _ in outputs), *seen_a.module.parameters(recurse=False))
        longest = max((size for tensor in tensors for size in tensor.shape), default=1)
        bound = tolerance or tolerance_between(dtype, depth, longest)
        yield ModulePair(
            name,
            type(seen_a.module).__name__,
            is_leaf(seen_a.module),
            bound,
            bound,
            differences_of((seen.to(wanted.device), wanted) for wanted, seen in inputs),
            differences_of((seen.to(wanted.device), wanted) for wanted, seen in outputs),
            Difference(),  # gradients are not compared
            Difference(),
            Difference(),
            _ulps(outputs, dtype),
        )


def _paired(a: Version, b: Version) -> Iterator[tuple[str, str]]:
    """Yield the names of corresponding modules: those with equal names, else equal weights."""
    left = {name: seen.module for name, seen in b.modules.items() if name not in a.modules}
    for name, seen in a.modules.items():
        if name in b.modules:
            yield name, name
            continue
        found = next((each for each in left if _has_same_weights(seen.module, left[each])), None)
        if found is not None:
            del left[found]
            yield name, found


def _has_same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Return whether two modules have own parameters that are equal up to rounding."""
    some, others = list(a.parameters(recurse=False)), list(b.parameters(recurse=False))
    if not some or [each.shape for each in some] != [other.shape for other in others]:
        return False
    return all(
        torch.equal(x.detach().to(dtype), y.detach().to(x.device, dtype))
        for x, y in zip(some, others, strict=True)
        for dtype in [coarser(x.dtype, y.dtype)]
    )


@torch.no_grad()
def _ulps(found: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Ulps:
    """Return the differences of entries in units in the last place."""
    units = []
    for wanted, seen in found:
        accurate = widest_float(wanted.device)
        one, other = wanted.to(accurate), seen.to(wanted.device, accurate)
        is_finite = one.isfinite()
        one, other = one[is_finite], other[is_finite]
        size = torch.maximum(one.abs(), other.abs()).clamp(min=one.square().mean().sqrt().item())
        unit = torch.finfo(dtype).eps * torch.ones_like(one).ldexp(size.frexp().exponent - 1)
        off = torch.where(one == other, 0.0, (one - other).abs() / unit)
        units.append(off.nan_to_num(nan=math.inf, posinf=math.inf))
    each = torch.cat(units)
    if not each.numel():
        return Ulps(0.0, 0.0, dtype)
    return Ulps(float(each.median()), float(each.max()), dtype)


def _require_valid(a: object, b: object, tolerance: object) -> None:
    """Check the arguments of :func:`compare`."""
    for name, version in (("a", a), ("b", b)):
        if not callable(version):
            raise TypeError(
                f"compare: {name} must be a model, or a function that calls one with the batch, "
                f"got {type(version).__name__}"
            )
    require_tolerance("compare", "tolerance", tolerance)


# --- a run of a version ---------------------------------------------------------------------------


Names = dict[int, str]
"""The names of modules, by the ``id()`` of the module."""


@dataclass
class SeenModule:
    """The values of a module in a run.

    Attributes:
        module: The module.
        inputs: The floating-point tensors among its arguments, for each call.
        outputs: The floating-point tensors that it returned, for each call.
        depth: The number of consecutive ops up to its outputs.
        dtype: The coarsest dtype of a floating-point tensor or parameter up to its outputs.
    """

    module: nn.Module
    inputs: list[list[Tensor]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    depth: int = 0
    dtype: torch.dtype = torch.float64


@dataclass
class Version:
    """A run of a version.

    Attributes:
        output: The returned value.
        modules: The modules that ran, by name, in the order in which they first returned.
    """

    output: Any
    modules: dict[str, SeenModule]


def run(version: Callable[..., Any], batch: Any, names: Names) -> Version:
    """Call a version with a batch, then restore its models and the random numbers.

    Args:
        version: The function or module.
        batch: The batch to call it with.
        names: The names of known modules; the names of other modules are added.

    Sync: none by itself.
    """
    listener, patches = _Listener(names, list(tensors_in([batch]))), Patches()
    states = RandomStates(accelerators())
    try:
        with eager(), listener.restoring:
            listener.install(patches)
            output = called_with(version, batch)
    finally:
        patches.undo()
        states.restore()
    return Version(output, listener.returned)


class _Listener(TopLevelCalls):
    """A recorder of the inputs and outputs of all modules in the models that are called."""

    def __init__(self, names: Names, batch: list[Tensor]) -> None:
        super().__init__()
        self.restoring = ExitStack()
        self.returned: dict[str, SeenModule] = {}
        self._names, self._batch = names, batch
        self._seen: dict[str, SeenModule] = {}
        self._restored: set[int] = set()
        self._copies = TensorCopies()
        self._depths, self._num_returned, self._dtype = Depths(), 0, torch.float64

    @property
    def is_on(self) -> bool:
        return True

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a model with hooks on its modules."""
        named = self._named(module)
        if id(module) not in self._restored:
            tensors = [*module.parameters(), *module.buffers(), *self._batch]
            device = tensors[0].device.type if tensors else "cpu"
            self.restoring.enter_context(restored(module, self._batch, device))
            self._restored |= {id(each) for each in module.modules()}

        def before(name: str, _: int, given: Any) -> None:
            seen = self._seen.setdefault(name, SeenModule(named[name]))
            seen.inputs.append(self._kept(given))
            for parameter in named[name].parameters(recurse=False):
                self._count_precision(parameter)

        def after(name: str, _: int, output: Any) -> None:
            seen = self.returned.setdefault(name, self._seen[name])
            seen.outputs.append(self._kept(output))
            self._num_returned += 1
            # The depth in autograd's graph, at least the number of modules that have returned.
            depths = [self._depths.of(tensor) for tensor in tensors_in([output])]
            seen.depth = max(seen.depth, self._num_returned, *depths)
            seen.dtype = self._dtype

        with self.inside(), module_hooks(named.items(), before, after):
            return original(module, *args, **kwargs)

    def call_loss(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a loss function without recording it."""
        return original(*args, **kwargs)

    def _named(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules of a model by name; modules that have a name keep it."""
        prefix = self._names.get(id(model), type(model).__name__ if self._restored else "")
        for path, module in replicated(model).named_modules():
            parts = (prefix, without_wrappers(path))
            self._names.setdefault(id(module), ".".join(part for part in parts if part))
        return {self._names[id(each)]: each for each in replicated(model).modules()}

    def _kept(self, values: Any) -> list[Tensor]:
        """Return copies of the floating-point tensors in containers."""
        found = [tensor for tensor in tensors_in([values]) if tensor.is_floating_point()]
        found = [each for each in found if not modes.is_inside_functorch(each)]
        for each in found:
            self._count_precision(each)
        return [self._copies.of(each) for each in found]

    def _count_precision(self, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            self._dtype = coarser(self._dtype, tensor.dtype)


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the less precise of two floating dtypes."""
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)
