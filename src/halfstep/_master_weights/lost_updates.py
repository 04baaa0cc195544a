"""Updates of weights that rounding has lost."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from halfstep._master_weights.master_weights import weight_of
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch.distributed import local_part
from halfstep._scaler.gradients import parameters
from halfstep._scaler.names import Names


class LostUpdates:
    """What became of the updates of the weights in a block; see :func:`lost_updates`.

    An update is lost if its gradient is not zero and the weight does not move: it was smaller than
    half a unit in the last place of the weight.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module | None) -> None:
        self._optimizer = optimizer
        self._names = Names()
        if module is not None:
            self._names.watch(module)
        self._hooks = ExitStack()
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._counts: dict[str, tuple[int, int, torch.dtype]] = {}

    def __enter__(self) -> LostUpdates:
        """Begin to count."""
        optimizer = self._optimizer
        self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self._hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        self._hooks.close()
        self._before = []

    @property
    def share(self) -> float:
        """The share of all updates that were lost, 0 to 1; NaN without any update."""
        return _share(
            sum(lost for lost, _, _ in self._counts.values()),
            sum(updates for _, updates, _ in self._counts.values()),
        )

    @property
    def shares(self) -> dict[str, float]:
        """The same for each parameter, by its name."""
        return {name: _share(lost, updates) for name, (lost, updates, _) in self._counts.items()}

    def __str__(self) -> str:
        """Return a sentence, and a line for each of the parameters that lost most."""
        if not self._counts:
            return "no updates were seen: optimizer.step() belongs in the block"
        dtypes = sorted({dtype_name(kind) for _, _, kind in self._counts.values()})
        lines = [f"{self.share:.1%} of the updates were lost to rounding in {', '.join(dtypes)}"]
        worst = sorted(self.shares.items(), key=lambda item: -item[1])[:5]
        return "\n".join(lines + [f"  {name}: {share:.1%}" for name, share in worst])

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():  # a fused optimizer skips
            return
        self._before = [
            (param, weight_of(optimizer, param), local_part(param.grad) != 0)
            for param in parameters(optimizer)
            if param.grad is not None and not param.grad.is_sparse
        ]

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        names = self._names.of([param for param, _, _ in self._before], optimizer)
        for name, (param, before, has_gradient) in zip(names, self._before, strict=True):
            is_same = local_part(weight_of(optimizer, param)) == local_part(before)
            lost, updates = self._counts.get(name, (0, 0, None))[:2]
            lost += int(is_same.logical_and_(has_gradient).sum())
            self._counts[name] = lost, updates + int(has_gradient.sum()), before.dtype
        self._before = []


def lost_updates(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None = None
) -> LostUpdates:
    """Count the updates that rounding loses, in a block with one step or more.

    Args:
        optimizer: Any optimizer of PyTorch's interface. With master weights it is the float32
            weights that are looked at, of which next to none are lost.
        module: Gives the parameters their names.

    Returns:
        A context manager, whose ``share`` and ``shares`` (by parameter) are the shares, 0 to 1, of
        the entries whose gradient was not zero and whose weight did not move. Steps that a
        GradScaler skips do not count, nor do sparse gradients. Of DTensors, what this rank holds.

    Memory: a copy of the weights for the time of a step. Sync: three for each parameter and step.

    Example:
        >>> model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> with lost_updates(optimizer, model) as lost:
        ...     optimizer.step()
        >>> lost.share > 0.9, sorted(lost.shares)
        (True, ['bias', 'weight'])
    """
    return LostUpdates(optimizer, module)


def _share(lost: int, updates: int) -> float:
    return lost / updates if updates else float("nan")
