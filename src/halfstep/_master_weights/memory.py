"""Memory of a training, in bytes for each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep._master_weights.master_weights import kept_of
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch.distributed import local_part
from halfstep._scaler.gradients import parameters


@dataclass(frozen=True)
class BytesPerParameter:
    """The memory that weights, gradients and the state of an optimizer take.

    Attributes:
        num_parameters: Number of entries of all parameters, on this rank.
        weights: Bytes of the parameters, by dtype.
        gradients: Those of the gradients that are there.
        states: Those of the state of the optimizer.
        masters: Those of what master weights keep beside the parameters.
    """

    num_parameters: int
    weights: dict[torch.dtype, int]
    gradients: dict[torch.dtype, int]
    states: dict[torch.dtype, int]
    masters: dict[torch.dtype, int]

    @property
    def total(self) -> float:
        """Bytes for each parameter, of all together."""
        kinds = (self.weights, self.gradients, self.states, self.masters)
        return sum(sum(kind.values()) for kind in kinds) / max(self.num_parameters, 1)

    def __str__(self) -> str:
        """Return a table, a row for each kind."""
        rows = [("", "bytes a parameter", "")]
        for name in ("weights", "gradients", "states", "masters"):
            kind: dict[torch.dtype, int] = getattr(self, name)
            each = sum(kind.values()) / max(self.num_parameters, 1)
            dtypes = ", ".join(map(dtype_name, kind))
            rows.append((name, f"{each:.2f}", dtypes))
        rows.append(("total", f"{self.total:.2f}", f"of {self.num_parameters:,} parameters"))
        return "\n".join(f"{name:10}{each:>17}  {more}".rstrip() for name, each, more in rows)


def bytes_per_parameter(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> BytesPerParameter:
    """Return how much memory a training takes for each parameter, as it is now.

    After a step, before ``zero_grad``, all of it is there. Of DTensors, what this rank holds. Casts
    of autocast and activations are not in it.

    Args:
        model: The model.
        optimizer: The optimizer.

    Returns:
        A value that prints as a table.

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
    params = list(dict.fromkeys([*model.parameters(), *parameters(optimizer)]))
    kept = {param: kept_of(optimizer, param) for param in params}
    states = [
        value
        for param in params
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor) and key not in kept[param]
    ]
    return BytesPerParameter(
        sum(local_part(param).numel() for param in params),
        _bytes_of(params),
        _bytes_of(param.grad for param in params if param.grad is not None),
        _bytes_of(states),
        _bytes_of(value for each in kept.values() for value in each.values()),
    )


def _bytes_of(tensors: Iterable[Tensor]) -> dict[torch.dtype, int]:
    found: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        local = local_part(tensor)
        found[tensor.dtype] += local.numel() * local.element_size()
    return dict(found)
