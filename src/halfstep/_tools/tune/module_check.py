"""Module checks: the errors of a module against float32, the permitted ones, and their text."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._common.formats import dtype_name
from halfstep._common.nested import map_plain
from halfstep._common.numbers import percent, things
from halfstep._common.text import aligned
from halfstep._pytorch.devices import widest_float
from halfstep._tools.trace.rows import grouped, short


@dataclass(frozen=True)
class Difference:
    """The difference of one or more tensors from float32; ``+`` adds differences."""

    size: int = 0  # number of compared entries
    square_error: float = 0.0  # sum over the entries that are finite in both
    square_norm: float = 0.0  # sum of the squares of the float32 values of these entries
    overflow: int = 0  # number of entries that are inf or NaN, but finite in float32
    flushed: int = 0  # number of entries that are zero, but not in float32
    nonzero: int = 0  # number of entries that are not zero in float32

    def __add__(self, other: Difference) -> Difference:
        return Difference(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def error(self) -> float:
        """The norm of the error relative to that of the float32 values; inf after an overflow.

        The error is 1 if all float32 values are zero and the values differ from them.

        Example:
            >>> Difference(size=2, square_error=1e-4, square_norm=4.0, nonzero=2).error
            0.005
        """
        if self.overflow:
            return math.inf
        if not self.square_norm:
            return 1.0 if self.square_error else 0.0
        return math.sqrt(self.square_error / self.square_norm)

    @property
    def overflow_share(self) -> float:
        """The fraction of entries that are inf or NaN, but finite in float32."""
        return self.overflow / self.size if self.size else 0.0

    @property
    def underflow_share(self) -> float:
        """The fraction of zeros among the entries that are not zero in float32."""
        return self.flushed / self.nonzero if self.nonzero else 0.0


UNCOMPARABLE = Difference(size=1, square_error=1.0, square_norm=1.0)
"""An error of 1, for tensors whose shapes differ because the program took another path."""


@torch.no_grad()
def difference(seen: Tensor, wanted: Tensor, scale: float = 1.0) -> Difference:
    """Compare a tensor, multiplied by a power of two, with its value in float32 or float64.

    Entries that are not finite there, such as -inf in a mask, are not compared. Sync: several.
    """
    if seen.shape != wanted.shape:
        return UNCOMPARABLE
    # Sums of squares of float32 values fit into float64.
    accurate = widest_float(wanted.device)
    seen, wanted = _dense(seen).to(accurate) / scale, _dense(wanted).to(accurate)
    square_norm, square_error = _square_sum(wanted), _square_sum(seen - wanted)
    overflow = 0
    if not math.isfinite(square_norm + square_error):
        is_wanted = wanted.isfinite()
        overflow = int((is_wanted & ~seen.isfinite()).sum())
        is_held = is_wanted & seen.isfinite()
        seen, wanted = seen[is_held], wanted[is_held]
        square_norm, square_error = _square_sum(wanted), _square_sum(seen - wanted)
    is_nonzero = wanted != 0
    return Difference(
        size=seen.numel() + overflow,
        square_error=square_error,
        square_norm=square_norm,
        overflow=overflow,
        flushed=int((is_nonzero & (seen == 0)).sum()),
        nonzero=int(is_nonzero.sum()),
    )


def amax(tensor: Tensor) -> float:
    """Return the largest magnitude, 0 for an empty tensor. Sync: one."""
    return float(_dense(tensor).abs().max()) if tensor.numel() else 0.0


def _square_sum(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


KINDS = ("input", "output", "output_gradient", "input_gradient", "parameters")
"""The kinds of tensors of a module that are compared."""


class BoundedError(NamedTuple):
    """An error and its tolerance."""

    error: float
    tolerance: float

    def __str__(self) -> str:
        return f"{self.error:.2g} of {self.tolerance:.2g}"

    def severity(self) -> float:
        """Return the error relative to the tolerance; above 1 it is too large."""
        return self.error / self.tolerance


@dataclass(frozen=True)
class ModuleCheck:
    """A module of a model, compared with float32.

    Attributes:
        module: Its name, empty for the model itself.
        kind: Its class.
        is_leaf: Whether it contains no modules.
        output_tolerance: The largest permitted output error.
        gradient_tolerance: The largest permitted gradient error.
        input: The difference of its inputs.
        output: The difference of its outputs.
        output_gradient: The difference of the gradients of its outputs.
        input_gradient: The difference of the gradients of its inputs. Other modules that use these
            inputs contribute to it.
        parameters: The difference of the gradients of its own parameters, taken together.
    """

    module: str
    kind: str
    is_leaf: bool
    output_tolerance: float
    gradient_tolerance: float
    input: Difference
    output: Difference
    output_gradient: Difference
    input_gradient: Difference
    parameters: Difference

    @property
    def is_output_good(self) -> bool:
        """Whether its outputs are within tolerance."""
        return self.output.error <= self.output_tolerance

    @property
    def bounded_output(self) -> BoundedError:
        """The output error."""
        return BoundedError(self.output.error, self.output_tolerance)

    @property
    def gradient(self) -> BoundedError:
        """The larger one of the gradient errors of outputs and parameters."""
        error = max(self.output_gradient.error, self.parameters.error)
        return BoundedError(error, self.gradient_tolerance)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were compared."""
        return bool(self.output_gradient.size or self.input_gradient.size or self.parameters.size)

    @property
    def passed(self) -> bool:
        """Whether its outputs and gradients are within tolerance."""
        return self.is_output_good and self.gradient.error <= self.gradient.tolerance

    @property
    def severity(self) -> float:
        """Its worst error relative to the tolerance; above 1 it has failed."""
        return self.worst.severity()

    @property
    def worst(self) -> BoundedError:
        """The error that is largest relative to its tolerance."""
        return max(self.bounded_output, self.gradient, key=BoundedError.severity)

    @property
    def overflow_share(self) -> float:
        """The largest fraction of new inf and NaN, in outputs or gradients."""
        parts = (self.output, self.output_gradient, self.parameters)
        return max(part.overflow_share for part in parts)

    @property
    def underflow_share(self) -> float:
        """The largest fraction of new zeros in gradients."""
        return max(self.output_gradient.underflow_share, self.parameters.underflow_share)

    @property
    def added(self) -> float:
        """The error that this module adds, in tolerances; inf if an overflow begins here."""
        gradients = max(self.input_gradient.error, self.parameters.error)
        return max(
            _more(self.output.error, self.input.error) / self.output_tolerance,
            _more(gradients, self.output_gradient.error) / self.gradient_tolerance,
        )


def _more(after: float, before: float) -> float:
    """Return the error that is added to ``before``; independent errors add in quadrature."""
    if math.isinf(before):
        return 0.0
    return math.sqrt(max(after**2 - before**2, 0.0))


def origins(rows: Iterable[ModuleCheck]) -> list[str]:
    """Return the names of the modules where a failure begins.

    The inputs of such a module are within tolerance, and its outputs are not. If the forward pass
    fails, gradients are ignored. For nested modules, only the innermost is named. ``""`` stands for
    the model's own ops and for the loss, for example if the gradient from the loss is already bad.
    """
    rows = list(rows)
    if all(row.passed for row in rows):
        return []
    if any(not row.is_output_good for row in rows):
        begin = [r for r in rows if not r.is_output_good and r.input.error <= r.output_tolerance]
    else:
        handed = [r for r in rows if not r.module and _is_handed_bad_gradients(r)]
        begin = handed or [
            row
            for row in rows
            if max(row.input_gradient.error, row.parameters.error) > row.gradient_tolerance
            and not _is_handed_bad_gradients(row)
        ]
    names = [row.module for row in begin]
    return [name for name in names if not any(is_within(other, name) for other in names)]


def _is_handed_bad_gradients(row: ModuleCheck) -> bool:
    return row.output_gradient.error > row.gradient_tolerance


def is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def is_within(name: str, other: str) -> bool:
    """Return whether a module is inside another one, by their names."""
    return name != other and (not other or name.startswith(other + "."))


def worst_of(batches: Sequence[Sequence[ModuleCheck]]) -> list[ModuleCheck]:
    """Return the check of each module on the batch on which it is worst."""
    by_name = grouped(chain.from_iterable(batches), lambda row: row.module)
    return [max(rows, key=lambda row: row.severity) for rows in by_name.values()]


@dataclass(frozen=True)
class Comparison:
    """A step in lower precision, compared with float32."""

    scale: float  # the scale of the loss
    loss: float
    loss32: float  # the loss in float32
    rows: tuple[ModuleCheck, ...]  # the modules that ran, in order

    @property
    def is_loss_good(self) -> bool:
        """Whether the loss is finite, or not finite in float32 either."""
        return math.isfinite(self.loss) or not math.isfinite(self.loss32)


# --- tolerances -----------------------------------------------------------------------------------


# docs/tune.md gives the formulas. Errors of n consecutive ops have random signs, so they add up
# like a random walk, e = u * sqrt(n): N. Higham, T. Mary, "A New Approach to Probabilistic Rounding
# Error Analysis", 2019, doi 10.1137/18M1226312, section 2. An output gets 8 e, because an op also
# rounds its weights and inputs, and a layer amplifies the errors of its inputs. At the corner of a
# ReLU, rounding decides whole entries of a gradient, a fraction of about e: sqrt(e) in the norm.
# Near the end of training, a gradient is the small difference of large terms, which any rounding of
# the activations changes: hence the unavoidable error.

SPREAD = 8.0
TIMES = 4.0
MOST = 0.5  # the largest tolerance derived from depth: a larger error leaves little of the value


class Tolerance(NamedTuple):
    """The largest permitted relative errors of a module."""

    output: float
    gradient: float  # for the gradients of its outputs and parameters


def tolerance_for(
    dtype: torch.dtype,
    depth: int,
    total_depth: int,
    given: float | None = None,
    unavoidable: float = 0.0,  # the error of its gradients if only outputs are rounded
) -> Tolerance:
    """Return the tolerance of a module from the numbers of consecutive ops, unless it is given.

    A gradient passes through all ops up to the loss, ``total_depth``, and back to the module.
    """
    if given is not None:
        return Tolerance(given, given)
    output = _rounding(dtype, depth)
    gradient = _rounding(dtype, 2 * total_depth - depth)
    of_gradient = min(SPREAD * gradient + 2 * math.sqrt(gradient), MOST)
    return Tolerance(min(SPREAD * output, MOST), max(of_gradient, TIMES * unavoidable))


def _rounding(dtype: torch.dtype, num: int) -> float:
    """Return the typical relative error of consecutive roundings."""
    return torch.finfo(dtype).eps / 2 * math.sqrt(max(num, 1))


class Depths:
    """The depths of tensors: the number of ops on the longest path to each in autograd's graph.

    Ops without a gradient are not counted.
    """

    def __init__(self) -> None:
        self._known: dict[Any, int] = {None: 0}

    def of(self, tensor: Tensor) -> int:
        """Return the depth of a tensor; results of earlier calls are reused."""
        pending = [tensor.grad_fn]
        while pending:
            node = pending[-1]
            if node in self._known:
                pending.pop()
                continue
            before = [each for each, _ in node.next_functions] if node is not None else []
            unknown = [each for each in before if each not in self._known]
            if unknown:
                pending += unknown
                continue
            # The node of a leaf has no predecessors and is not an op.
            self._known[node] = 1 + max(self._known[each] for each in before) if before else 0
            pending.pop()
        return self._known[tensor.grad_fn]


@contextmanager
def outputs_rounded(modules: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Round the outputs of leaf modules to the digits of ``dtype``, not to its range.

    Gradients pass through unchanged.
    """

    def rounded(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return value
        return value + (rounded_to_digits(value.detach(), dtype) - value.detach())

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return map_plain(rounded, output)

    with ExitStack() as stack:
        for module in modules:
            if is_leaf(module):
                stack.callback(module.register_forward_hook(after).remove)
        yield


def rounded_to_digits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values rounded to nearest to the digits of a dtype, in float32.

    (T. J. Dekker, "A floating-point technique for extending the available precision", 1971, doi
    10.1007/BF01397083: the upper half of a split.)
    """
    digits_less = math.log2(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    split = values * (2.0**digits_less + 1)
    upper = split - (split - values)
    return torch.where(upper.isfinite(), upper, values)


# --- text -----------------------------------------------------------------------------------------

OUTSIDE = "ops outside of its modules, or the loss"
MOST_PASSING = 12  # the largest number of passed modules that are printed
HEAD = ("module", "class", "output error", "gradient error", "overflow", "underflow", "")


def short_dtype(dtype: torch.dtype) -> str:
    """Return ``"fp16"`` or ``"bf16"``."""
    return short(dtype_name(dtype))


def check_lines(rows: Sequence[ModuleCheck], origins: Collection[str]) -> list[str]:
    """Return the lines of a table: all failed modules, and the first of the passed ones."""
    failed = [row for row in rows if not row.passed or row.module in origins]
    passed = [row for row in rows if row not in failed]
    cells = [
        (*_cells(row), "begins here" if row.module in origins else "ok" if row.passed else "FAIL")
        for row in failed + passed[:MOST_PASSING]
    ]
    left = things(len(passed) - MOST_PASSING, "module")
    rest = [f"and {left} that passed, with smaller errors"] if passed[MOST_PASSING:] else []
    return [*aligned([HEAD, *cells], right=()), *rest]


def _cells(row: ModuleCheck) -> tuple[str, ...]:
    return (
        row.module or "(the model)",
        row.kind,
        str(row.bounded_output),
        str(row.gradient) if row.has_gradients else "-",
        percent(row.overflow_share) if row.overflow_share else "-",
        percent(row.underflow_share) if row.underflow_share else "-",
    )
