"""What is known of one module after a pass: plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halfstep._tune.difference import Difference


class Judged(NamedTuple):
    """An error, and what it may be."""

    error: float
    tolerance: float


@dataclass(frozen=True)
class Row:
    """One module of a model, compared with float32.

    Attributes:
        module: Its name, empty for the model itself.
        kind: Its class.
        is_leaf: Whether it has no modules in it.
        output_tolerance: What its output error may be.
        gradient_tolerance: What its gradient errors may be.
        input: Of what it was called with.
        output: Of what it returned.
        output_gradient: Of the gradients of its outputs, which the backward pass hands it.
        input_gradient: Of the gradients of its inputs; others that use these have a part in them.
        parameters: Of the gradients of its own parameters, all together.
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
        """Whether what it returned is within tolerance."""
        return self.output.error <= self.output_tolerance

    @property
    def are_gradients_good(self) -> bool:
        """Whether the gradients of its outputs and parameters are within tolerance."""
        worst = max(self.output_gradient.error, self.parameters.error)
        return worst <= self.gradient_tolerance

    @property
    def passed(self) -> bool:
        """Whether all of it is within tolerance."""
        return self.is_output_good and self.are_gradients_good

    @property
    def gradient_error(self) -> float:
        """The larger of the errors of the gradients of outputs and parameters."""
        return max(self.output_gradient.error, self.parameters.error)

    @property
    def severity(self) -> float:
        """The worst of its errors by what that may be: above 1 it has failed."""
        return self.worst.error / self.worst.tolerance

    @property
    def worst(self) -> Judged:
        """The error that is furthest from what it may be."""
        output = Judged(self.output.error, self.output_tolerance)
        gradient = Judged(self.gradient_error, self.gradient_tolerance)
        return max(output, gradient, key=lambda each: each.error / each.tolerance)

    @property
    def overflow_share(self) -> float:
        """Share of inf and NaN that are not there in float32, in outputs or gradients."""
        parts = (self.output, self.output_gradient, self.parameters)
        return max(part.overflow_share for part in parts)

    @property
    def underflow_share(self) -> float:
        """Share of the entries of gradients that are zero and are not in float32."""
        return max(self.output_gradient.underflow_share, self.parameters.underflow_share)

    @property
    def added(self) -> float:
        """How much error comes in here, forward or backward; inf where an overflow begins."""
        gradients = max(self.input_gradient.error, self.parameters.error)
        return max(
            _more(self.output.error, self.input.error) / self.output_tolerance,
            _more(gradients, self.output_gradient.error) / self.gradient_tolerance,
        )


def _more(after: float, before: float) -> float:
    """Return what is added to an error, which adds up by its squares."""
    if math.isinf(before):
        return 0.0
    return math.sqrt(max(after**2 - before**2, 0.0))


def origins(rows: Iterable[Row]) -> list[str]:
    """Return the names of the modules where a failure begins.

    That is where what goes in is within tolerance and what comes out is not. The forward pass is
    looked at first: where it fails, the gradients tell nothing. Of modules inside each other it is
    the innermost. ``""`` stands for the model's own ops and for the loss: so if the gradient that
    the loss hands the model is bad already.
    """
    rows = list(rows)
    if all(row.passed for row in rows):
        return []
    if any(not row.is_output_good for row in rows):
        begin = [r for r in rows if not r.is_output_good and r.input.error <= r.output_tolerance]
    else:
        handed = [r for r in rows if not r.module and _is_handed_bad_gradients(r)]
        begin = handed or [row for row in rows if _spoils_gradients(row)]
    names = [row.module for row in begin]
    return [name for name in names if not any(is_within(other, name) for other in names)]


def _is_handed_bad_gradients(row: Row) -> bool:
    return row.output_gradient.error > row.gradient_tolerance


def _spoils_gradients(row: Row) -> bool:
    if _is_handed_bad_gradients(row):
        return False
    return max(row.input_gradient.error, row.parameters.error) > row.gradient_tolerance


def is_within(name: str, other: str) -> bool:
    """Say whether a module is inside of another."""
    return name != other and (not other or name.startswith(other + "."))


def worst_of(batches: Sequence[Sequence[Row]]) -> list[Row]:
    """Return one row for each module: that of the batch on which it is worst."""
    by_name: dict[str, list[Row]] = {}
    for rows in batches:
        for row in rows:
            by_name.setdefault(row.module, []).append(row)
    return [max(rows, key=lambda row: row.severity) for rows in by_name.values()]
