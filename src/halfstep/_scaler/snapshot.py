"""Snapshot of what a step may change, for a step that has to be undone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep._scaler.gradients import parameters
from halfstep._scaler.optimizers import evaluates_first, members


class Snapshot:
    """The values of tensors, and what dictionaries hold. Sync: none.

    Args:
        tensors: Tensors, whose values are copied.
        dicts: Dictionaries, each with the copy that it is put back to.
    """

    def __init__(
        self, tensors: Iterable[Tensor], dicts: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]
    ) -> None:
        self._values = [(each, each.detach().clone()) for each in tensors if _is_writable(each)]
        self._dicts = list(dicts)

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back."""
        for held, before in self._dicts:
            held.clear()
            held.update(before)
        for tensor, value in self._values:
            tensor.copy_(value)


def snapshot_of(optimizer: torch.optim.Optimizer) -> Snapshot:
    """Return a snapshot of parameters, state and groups, to be restored once.

    Takes their memory once more; nothing for an optimizer that evaluates its closure before it
    changes something.
    """
    if evaluates_first(optimizer):
        return Snapshot([], [])
    params, each_of = list(parameters(optimizer)), members(optimizer)
    groups = [group for each in each_of for group in each.param_groups]
    states = [getattr(each, "state", None) for each in each_of]
    # A wrapper may have no state, and that of a container may be a view of others.
    held = [*(state for state in states if isinstance(state, dict)), *groups]
    memo = {id(each): each for each in [*params, *(group["params"] for group in groups)]}
    return Snapshot(
        params,
        [(each, {key: copy.deepcopy(value, memo) for key, value in each.items()}) for each in held],
    )


def _is_writable(tensor: Tensor) -> bool:
    # An expanded tensor cannot be written to, and so nobody has.
    return tensor.layout is not torch.strided or 0 not in tensor.stride() or tensor.numel() < 2
