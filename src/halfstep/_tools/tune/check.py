"""Self-check: a model in lower precision compared with float32, on one batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep._autocast import Policy
from halfstep._common.numbers import power, things
from halfstep._tools.tune.module_check import (
    OUTSIDE,
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
    parameters. Errors are relative errors of norms. Both passes start from the same weights,
    buffers and random numbers (a fixed seed). Afterwards, these and all gradients are restored
    bit for bit. In float16 the loss is scaled, as in training. docs/tune.md explains how
    tolerances are chosen and what a failure means.

    Args:
        model: The model, with float32 parameters. Training or evaluation mode stays as it is.
        batch: Without ``loss_fn``, the input of the model: a tensor, a tuple of arguments, or a
            dictionary of keyword arguments. With ``loss_fn``, anything that it takes.
        loss_fn: ``loss_fn(model, batch)`` calls the model and returns a scalar. For inference it
            returns outputs, detached if gradients do not matter. If None, the model is called.
            The loss of outputs is their ``loss``, else the output if it is one number, else the
            sum of the mean squares of its floating-point tensors.
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
    lowering = lowering_of("self_check", dtype, policy, "tolerance", tolerance)
    with step_runner(Task(model, loss_fn), batch, lowering) as runner:
        return SelfCheck.of(compare_step(runner, reference_of(runner)), lowering)


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
        """Return the result of a comparison."""
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


def lowering_of(
    asker: str, dtype: torch.dtype, policy: Policy | str, name: str, error: float | None
) -> Lowering:
    """Return the settings of a user after checking them.

    Raises:
        ValueError: The dtype is not a lower precision, the error is not above 0 and finite, or
            the policy is invalid.
        TypeError: One of them has the wrong type.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{asker}: dtype must be torch.float16 or torch.bfloat16, got {dtype!r}")
    if error is not None:
        if isinstance(error, bool) or not isinstance(error, (int, float)):
            raise TypeError(
                f"{asker}: {name} must be a number such as 0.01, or None, got {error!r}"
            )
        if not 0 < error < math.inf:
            raise ValueError(
                f"{asker}: {name} must be above 0 and finite, such as 0.01, got {error}"
            )
    if not isinstance(policy, (str, Policy)):
        raise TypeError(f"{asker}: policy must be a Policy or its text, got {policy!r}")
    return Lowering(dtype, Policy.parse(policy) if isinstance(policy, str) else policy, error)
