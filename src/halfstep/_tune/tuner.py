"""Finding the modules that lower precision hurts, and the fewest islands that cure it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep._autocast import Policy
from halfstep._common.machine import device_name
from halfstep._tune.check import lowering_of
from halfstep._tune.measuring import Bencher, module_of, with_islands
from halfstep._tune.passes import Lowering
from halfstep._tune.progress import watcher
from halfstep._tune.record import Measurements, fingerprint
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
    """Find the smallest set of float32 islands with which a model does well in lower precision.

    Each step is compared with the same in float32, as :func:`self_check` does. Where a module goes
    out of bounds and what it was given is within them, it becomes an island, until none is out of
    bounds; islands that are not needed are dropped again, so that none of the rest can be. Where
    a module has others in it, rules for a few ops of its own are tried instead. Then it is
    measured what they cost. The model, its gradients and all random numbers are as before,
    bit for bit. How it is done: docs/tune.md.

    Args:
        model: Its parameters are float32; better trained for a while than fresh.
        batches: Some batches, in the form in which ``loss_fn`` takes them.
        loss_fn: ``loss_fn(model, batch)`` calls the model and returns a scalar. None to call the
            model with the batch, as in :func:`self_check`.
        dtype: The lower precision, float16 or bfloat16.
        error: The bound: the largest relative error (norm by norm) that the outputs, the gradients
            of the outputs and the gradients of the parameters of any module may have. None for
            the tolerances of :func:`self_check`.
        path: A file for the measurements (JSON Lines). If it exists, what is in it is not measured
            again: after an interruption the same call goes on from there.
        policy: Which op runs in which dtype, to which islands are added; or its text.

    Raises:
        TypeError: An argument, or the loss, is of the wrong kind.
        ValueError: There is no batch; ``dtype`` is no lower precision; a parameter is not float32;
            the loss is not one number.
        RecordError: The file holds measurements of something else; the message says what differs.

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
    with watcher() as watching:
        bencher = Bencher(task, batches, lowering, known, watching)
        islands = smallest(bencher.look)
        islands = narrowed(bencher.look, islands, bencher.ops() if islands else {})
        return _told(bencher, lowering, islands)


def require_batches(batches: object) -> None:
    """Raise an error that says what is wrong, unless there are batches in a list.

    Raises:
        TypeError: It is no list, or a single batch.
        ValueError: It is empty.
    """
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        kind = type(batches).__name__
        raise TypeError(f"batches is a list of batches, got {kind}: write [batch], list(loader)")
    if not batches:
        raise ValueError("batches is empty: there is nothing to run the model on")


def _told(bencher: Bencher, lowering: Lowering, islands: Islands) -> Tuned:
    """Measure what islands cost, and put everything together."""
    before, after = bencher.rows(()), bencher.rows(islands)
    order = {row.module: number for number, row in enumerate(before)}
    islands = tuple(sorted(islands, key=lambda each: order[module_of(each)]))
    seconds = bencher.times(islands)
    return Tuned(
        policy=with_islands(lowering.policy, islands),
        islands=islands,
        costs=tuple(_cost(bencher, name, islands, seconds) for name in islands),
        is_met=bencher.look(islands).num_failing == 0,
        dtype=lowering.dtype,
        rows=tuple(before),
        rows_after=tuple(after),
        seconds=seconds,
        machine=device_name(bencher.task.device(bencher.batches[0])),
    )


def _cost(
    bencher: Bencher, name: str, islands: Islands, seconds: dict[str, dict[str, float]]
) -> Island:
    others = tuple(other for other in islands if other != name)
    rows, rows_with = bencher.rows(others), bencher.rows(islands)
    module = module_of(name)
    row = next(row for row in rows if row.module == module)
    (num, size), (num_without, size_without) = bencher.casts(islands), bencher.casts(others)
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
