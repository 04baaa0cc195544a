"""Large values in the batch that a model or a loss is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from halfstep._common.numbers import listed
from halfstep._pytorch import modes
from halfstep._tools.measure import is_finite
from halfstep._tools.replay.blame import name_in_code
from halfstep._tools.replay.kept_calls import KeptCall, is_model, needed_for

LARGE = 50.0
"""The size of a value from which on it is large for an input or a target."""
_DIFFERENCES = ("sub", "__sub__", "__rsub__")


def of_inputs(calls: Sequence[KeptCall]) -> str:
    """Return the cure of inputs and targets with large values; empty if there are none. Sync."""
    with modes.unseen_by_modes(), torch.no_grad():
        found = dict(_large(calls))
    how = "(x - x.mean(0)) / x.std(0) of the training data"
    return (
        f"standardise {listed([*found])}, as by {how}: {'; '.join(found.values())}" if found else ""
    )


def _large(calls: Sequence[KeptCall]) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors with large values, each with a sentence."""
    for call in calls:
        if isinstance(call.function, nn.Module) or call.name.endswith(("loss", *_DIFFERENCES)):
            for tensor, made_by in call.arguments():
                is_data = tensor.is_floating_point() and tensor.dim() and not tensor.requires_grad
                parts = needed_for([] if made_by is None else [made_by])
                if not is_data or any(is_model(part.function) for part in parts):
                    continue
                name = name_in_code(tensor).partition(" in ")[0]
                if not name.endswith("without a name") and (said := _said(name, tensor)):
                    yield name, said


def _said(name: str, tensor: Tensor) -> str:
    """Return how large the values of a tensor are, by column; empty if they are small."""
    if not tensor.numel() or not is_finite(tensor):
        return ""
    sizes = tensor.float().abs()
    columns = sizes.amax(0) if tensor.dim() == 2 else sizes.amax().reshape(1)
    largest, column = map(float, columns.max(0))
    if largest < LARGE:
        return ""
    columns[int(column)] = 0
    other = float(columns.max())
    if len(columns) == 1 or other > largest / 2:
        return f"{name} reaches {_number(largest)}"
    which = f"column {int(column)} of {len(columns)}"
    return f"{name} reaches {_number(largest)} in {which}, {_number(other)} in the others"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
