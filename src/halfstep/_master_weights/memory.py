"""Memory of training, in bytes per parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from halfstep._common.nested import tensors_reached
from halfstep._common.numbers import things
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import members, require_optimizer
from halfstep._master_weights.master_weights import KEYS
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch.distributed import local_part
from halfstep._pytorch.parts import parts_of


@dataclass(frozen=True)
class BytesPerParameter:
    """The memory of weights, gradients and optimizer state.

    Attributes:
        num_parameters: Number of entries of all parameters, on this rank.
        weights: Bytes of the parameters, by dtype.
        gradients: Bytes of the existing gradients, by dtype.
        states: Bytes of the optimizer state without ``masters``, by dtype.
        masters: Bytes that master weights keep beside the parameters, by dtype.
    """

    num_parameters: int
    weights: dict[torch.dtype, int]
    gradients: dict[torch.dtype, int]
    states: dict[torch.dtype, int]
    masters: dict[torch.dtype, int]

    @property
    def total(self) -> float:
        """Bytes per parameter, all kinds together."""
        kinds = (self.weights, self.gradients, self.states, self.masters)
        return sum(sum(kind.values()) for kind in kinds) / max(self.num_parameters, 1)

    def __str__(self) -> str:
        """Return a table with a row for each kind."""
        rows = [("", "bytes a parameter", "")]
        for name in ("weights", "gradients", "states", "masters"):
            kind: dict[torch.dtype, int] = getattr(self, name)
            each = sum(kind.values()) / max(self.num_parameters, 1)
            dtypes = ", ".join(map(dtype_name, kind))
            rows.append((name, f"{each:.2f}", dtypes))
        of = f"of {things(self.num_parameters, 'parameter')}"
        rows.append(("total", f"{self.total:.2f}", of))
        return "\n".join(f"{name:10}{each:>17}  {more}".rstrip() for name, each, more in rows)


def bytes_per_parameter(
    model: torch.nn.Module, *optimizers: torch.optim.Optimizer
) -> BytesPerParameter:
    """Return the current memory of training per parameter.

    Call it after a step and before ``zero_grad``, when all of the memory is in use. For DTensors,
    the part on this rank counts. Casts of autocast and activations do not count.

    Args:
        model: The model.
        optimizers: All its optimizers, or wrappers or containers of them.

    Returns:
        A value that prints as a table.

    Raises:
        TypeError: One of ``optimizers`` is not an optimizer.

    Sync: none.

    Example:
        >>> import halfstep
        >>> model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        >>> optimizer = halfstep.master_weights(torch.optim.SGD(model.parameters(), momentum=0.9))
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> print(bytes_per_parameter(model, optimizer))
                  bytes a parameter
        weights                2.00  bfloat16
        gradients              2.00  bfloat16
        states                 4.00  float32
        masters                2.00  int16
        total                 10.00  of 4,160 parameters
    """
    for optimizer in optimizers:
        require_optimizer("bytes_per_parameter", optimizer)
    reached = chain.from_iterable(map(_reached, optimizers))
    apart = {id(optimizer): optimizer for optimizer in reached}.values()
    params = dict.fromkeys(chain(model.parameters(), *map(parameters, apart)))
    states, masters = list[Any](), list[Any]()
    for optimizer in apart:
        state = getattr(optimizer, "state", None)  # of a container, it may be anything
        if isinstance(state, Mapping):
            for key, value in chain.from_iterable(map(_items, state.values())):
                (masters if key in KEYS else states).append(value)
    return BytesPerParameter(
        sum(local_part(param).numel() for param in params),
        _bytes_of(params),
        _bytes_of(param.grad for param in params if param.grad is not None),
        _bytes_of(chain.from_iterable(map(tensors_reached, states))),
        _bytes_of(masters),
    )


def _reached(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer, those that it holds, and those that any of these wrap."""
    found = members(optimizer)
    for each in found:  # grows in the loop
        attributes = vars(each).values()
        found += [a for a in attributes if isinstance(a, torch.optim.Optimizer) and a not in found]
    return found


def _items(state: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of an entry of the state; an entry that is no mapping has the key None."""
    return state.items() if isinstance(state, Mapping) else [(None, state)]


def _bytes_of(tensors: Iterable[Tensor]) -> dict[torch.dtype, int]:
    found: Counter[torch.dtype] = Counter()
    each_once = {id(tensor): tensor for tensor in tensors}.values()
    for part in chain.from_iterable(parts_of(tensor) or [tensor] for tensor in each_once):
        found[part.dtype] += part.numel() * part.element_size()
    return dict(found)
