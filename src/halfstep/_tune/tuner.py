"""Tuning: finds the modules that lower precision harms, and the fewest islands that cure it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep._autocast import Policy
from halfstep._common.machine import device_name
from halfstep._tune.check import lowering_of
from halfstep._tune.measurements import Measurements, fingerprint
from halfstep._tune.measurer import Measurer, module_of, show_progress, with_islands
from halfstep._tune.passes import Lowering
from halfstep._tune.result import Island, Tuned, loses_to, worst_error
from halfstep._tune.search import Islands, narrowed, smallest
from halfstep._tune.task import LossFn, Task


def tune(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFn | None,
    dtype: torch.dtype = torch.float16,
    error: float | None = None,
    path: str | Path | None = None,
    policy: Policy | str = "standard",
) -> Tuned:
    """Find the smallest set of float32 islands that a model needs in lower precision.

    Each step is compared with float32, as in :func:`self_check`. A module that is out of bounds
    although its inputs are not becomes an island, until no module is out of bounds. Islands that
    are not needed are then dropped. For a module that contains modules, rules for a few of its ops
    are tried instead. Then the cost of the islands is measured. The model, its gradients and all
    random numbers are as before, bit for bit. docs/tune.md explains the method.

    Args:
        model: The model, with float32 parameters; preferably one that was trained for a while.
        batches: Some batches, in the form that ``loss_fn`` takes.
        loss_fn: ``loss_fn(model, batch)`` calls the model and returns a scalar. None to call the
            model with the batch, as in :func:`self_check`.
        dtype: The lower precision, float16 or bfloat16.
        error: The bound: the largest relative error of norms that the outputs, their gradients
            and the gradients of the parameters of any module may have. None for the tolerances of
            :func:`self_check`.
        path: A file for the measurements (JSON Lines). Measurements in an existing file are not
            repeated: after an interruption the same call continues from there.
        policy: The policy to which islands are added, or its text.

    Raises:
        TypeError: An argument, or the loss, is of the wrong type.
        ValueError: There is no batch, ``dtype`` is not a lower precision, a parameter is not
            float32, or the loss is not one number.
        RecordError: The file has measurements of something else; the message says what differs.

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
    task, lowering = Task(model, loss_fn), lowering_of("tune", dtype, policy, "error", error)
    require_batches(batches)
    marks = fingerprint(task, batches, lowering) if path else {}
    known = Measurements(Path(path) if path else None, marks)
    with show_progress() as progress:
        measurer = Measurer(task, batches, lowering, known, progress)
        islands = smallest(measurer.measure)
        islands = narrowed(measurer.measure, islands, measurer.ops() if islands else {})
        return _tuned(measurer, lowering, islands)


def require_batches(batches: object) -> None:
    """Check that there is a list of batches.

    Raises:
        TypeError: It is not a list, or a single batch.
        ValueError: It is empty.
    """
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        kind = type(batches).__name__
        raise TypeError(
            f"batches must be a list of batches, got {kind}: write [batch], list(loader)"
        )
    if not batches:
        raise ValueError("batches is empty: there is nothing to run the model on")


def _tuned(measurer: Measurer, lowering: Lowering, islands: Islands) -> Tuned:
    """Measure the cost of islands and return the result."""
    before, after = measurer.rows(()), measurer.rows(islands)
    order = {row.module: number for number, row in enumerate(before)}
    islands = tuple(sorted(islands, key=lambda each: order[module_of(each)]))
    seconds = measurer.times(islands)
    return Tuned(
        policy=with_islands(lowering.policy, islands),
        islands=islands,
        costs=tuple(_cost(measurer, name, islands, seconds) for name in islands),
        is_met=measurer.measure(islands).num_failing == 0,
        dtype=lowering.dtype,
        rows=tuple(before),
        rows_after=tuple(after),
        seconds=seconds,
        machine=device_name(measurer.task.device(measurer.batches[0])),
    )


def _cost(
    measurer: Measurer, name: str, islands: Islands, seconds: dict[str, dict[str, float]]
) -> Island:
    others = tuple(other for other in islands if other != name)
    rows, rows_with = measurer.rows(others), measurer.rows(islands)
    module = module_of(name)
    row = next(row for row in rows if row.module == module)
    (num, size), (num_without, size_without) = measurer.casts(islands), measurer.casts(others)
    return Island(
        name=name,
        kind=row.kind if module else "",
        loses_to=loses_to(row),
        error_without=worst_error(rows),
        error_with=worst_error(rows_with),
        seconds_lowered=seconds["lower"][module],
        seconds=seconds["islands"][module],
        num_casts=num - num_without,
        cast_bytes=size - size_without,
    )
