"""Counts of the weight updates that are lost to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep._common.formats import dtype_name
from halfstep._gradients.optimizers import Names, makes_step_of, members, require_optimizer
from halfstep._master_weights.master_weights import weight_of, with_masters
from halfstep._pytorch.devices import to_device
from halfstep._pytorch.distributed import local_part
from halfstep._pytorch.modes import is_fake
from halfstep._pytorch.optim import optimizer_step_depth

LOOKED_AT = 1 << 16
"""Approximate number of entries of a weight that are inspected, and copied before a step."""
NUM_ROWS = 16  # minimum number of rows in a sample
ROW = 1024  # length of the rows into which a vector is split


def looked_at(values: Tensor, limit: int | None = None) -> Tensor:
    """Return all entries, or equally spaced rows if there are more than ``limit``."""
    limit = limit or LOOKED_AT
    if values.numel() <= limit:
        return values
    if values.ndim < 2:
        flat = values.reshape(-1)
        rows = flat[: flat.numel() // ROW * ROW].view(-1, ROW)
    else:
        # In a convolution weight the last dimension is only a part of a row.
        is_matrix_of_rows = values.shape[-1] > 7
        rows = values.reshape(-1, values.shape[-1]) if is_matrix_of_rows else values.flatten(1)
    sample = rows[:: max(rows.shape[0] // max(limit // rows.shape[1], NUM_ROWS), 1)]
    return sample[:, :: max(sample.numel() // (NUM_ROWS * limit), 1)]  # shortens long rows


class Counted(NamedTuple):
    """The updates of one parameter in one step, counted."""

    param: Tensor
    dtype: torch.dtype  # of the weight behind it
    counts: Tensor  # number of updates and of lost ones, [2], int64

    def in_full(self) -> Tensor:
        """Return the counts in the inspected part, extrapolated to the size of the tensor."""
        values = local_part(self.param)
        return self.counts.float() * (values.numel() / max(looked_at(values).numel(), 1))


class _Before(NamedTuple):
    param: Tensor
    weight: Tensor  # inspected entries of the weight behind it
    has_gradient: Tensor | None  # by entry, whether it is nonzero; None with a closure
    is_moved: Tensor | bool  # whether the learning rate is not zero


class StepUpdates:
    """The weights of an optimizer before a step, to count lost updates after it.

    The following do not count: sparse gradients, weights with a learning rate of 0 (as in the first
    step of a warm-up) or that end as inf or NaN, tensors without values, and steps that an
    optimizer with ``found_inf`` skips. The gradients before the step count, since it may zero them;
    the last if a closure computes them. ``part`` returns the entries to inspect. Sync: none.
    """

    @torch.no_grad()
    def __init__(
        self, optimizer: Optimizer, has_closure: bool, part: Callable[[Tensor], Tensor]
    ) -> None:
        # A wrapper has no master weights of its own.
        self._optimizer = next(iter(with_masters(optimizer)), optimizer)
        self._part = part
        found_inf = getattr(optimizer, "found_inf", None)
        self._is_taken = None if found_inf is None else found_inf == 0
        self._before: list[_Before] = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                has_gradient = None if has_closure else self._has_gradient(param)
                is_counted = param.requires_grad if has_closure else has_gradient is not None
                if (
                    is_counted
                    and param.layout is torch.strided
                    and not (param.is_meta or is_fake(param))
                ):
                    rate = group.get("lr", 1.0)
                    is_moved = rate.ne(0.0) if isinstance(rate, Tensor) else bool(rate)
                    before = self._looked_at(param).clone()
                    self._before.append(_Before(param, before, has_gradient, is_moved))

    def _looked_at(self, param: Tensor) -> Tensor:
        return self._part(local_part(weight_of(self._optimizer, param)))

    def _has_gradient(self, param: Tensor) -> Tensor | None:
        """Return which entries have a nonzero gradient; None without a dense gradient."""
        grad = param.grad
        if grad is None or grad.layout is not torch.strided:
            return None
        return self._part(local_part(grad)) != 0

    @torch.no_grad()
    def counted(self) -> list[Counted]:
        """Return the counts of the step made since."""
        found = []
        for param, before, has_gradient, is_moved in self._before:
            if has_gradient is None:
                has_gradient = self._has_gradient(param)
            after = self._looked_at(param)
            if has_gradient is None or not has_gradient.shape == after.shape == before.shape:
                continue
            is_updated = has_gradient & after.isfinite()
            counts = torch.stack([is_updated.sum(), (is_updated & (after == before)).sum()])
            for flag in (self._is_taken, is_moved):
                if flag is not None:
                    counts *= to_device(flag, counts.device) if isinstance(flag, Tensor) else flag
            found.append(Counted(param, before.dtype, counts))
        return found


class OpenSteps:
    """The running steps of optimizers; of nested steps, only the outermost.

    The step of a class may call that of its base class, and the step of a wrapper calls that of the
    wrapped optimizer: all have hooks. The step of a container does not count; the steps of the
    optimizers in it do.
    """

    def __init__(self, part: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        self._part = part
        self._open: dict[int, tuple[int, Optimizer, StepUpdates]] = {}

    def begin(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the weights before a step; call this from a pre-hook, with its arguments."""
        depth = optimizer_step_depth()
        for outer_depth, outer, _ in self._open.values():
            # An open step that is not further out was ended by an exception.
            if outer_depth < depth and makes_step_of(outer, optimizer):
                return
        held = (member for member in members(optimizer) if member is not optimizer)
        if any(isinstance(each, Optimizer) for each in held):
            return
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        step = StepUpdates(optimizer, has_closure, self._part)
        self._open[id(optimizer)] = depth, optimizer, step

    def end(self, optimizer: Optimizer) -> list[Counted]:
        """Return the counts of a step, none for a nested one; call this from a post-hook."""
        found = self._open.get(id(optimizer))
        if found is None or found[0] != optimizer_step_depth():
            return []
        del self._open[id(optimizer)]
        return found[-1].counted()

    def clear(self) -> None:
        self._open.clear()


class lost_updates:
    """Count the updates that are lost to rounding in a block with at least one step.

    An update is lost if its gradient is nonzero and the weight does not change, because the update
    was smaller than half a unit in the last place of the weight. ``share`` and, by parameter,
    ``shares`` are the shares, 0 to 1, of the entries with a nonzero gradient. Steps that a
    GradScaler skips, steps with a learning rate of 0, and sparse gradients do not count. With a
    closure, the last gradients count; for DTensors, the entries on this rank.

    Args:
        optimizer: Any optimizer with PyTorch's interface, or a wrapper or container of such. With
            master weights, the float32 weights are inspected, which lose almost no updates.
        module: The model, for the names of the parameters.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.

    Memory: a copy of the weights during a step. Sync: one for each parameter when a share is read.

    Example:
        >>> model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> with lost_updates(optimizer, model) as lost:
        ...     optimizer.step()
        >>> lost.share > 0.9, sorted(lost.shares)
        (True, ['bias', 'weight'])
    """

    def __init__(self, optimizer: Optimizer, module: torch.nn.Module | None = None) -> None:
        require_optimizer("lost_updates", optimizer)
        self._optimizer = optimizer
        self._names = Names()
        if module is not None:
            self._names.watch(module)
        self._hooks = ExitStack()
        self._steps = OpenSteps()
        self._counts: dict[str, Tensor] = {}
        self._dtypes: set[torch.dtype] = set()

    def __repr__(self) -> str:
        return f"lost_updates({type(self._optimizer).__name__})"

    def __enter__(self) -> Self:
        # Global hooks, since wrappers and containers of optimizers may have none of their own.
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._steps.clear()

    @property
    def share(self) -> float:
        """The share of all updates that were lost, 0 to 1; NaN if there were no updates."""
        counts = [count.cpu() for count in self._counts.values()]
        return _share(torch.stack(counts).sum(0)) if counts else float("nan")

    @property
    def shares(self) -> dict[str, float]:
        """The share of lost updates of each parameter, by name; NaN without updates."""
        return {name: _share(counts) for name, counts in self._counts.items()}

    def __str__(self) -> str:
        """Return a sentence, and a line for each of the five parameters that lost most."""
        shares = {name: share for name, share in self.shares.items() if share == share}
        if not shares:
            return (
                "no updates were seen: optimizer.step() belongs in the block. Steps that are "
                "skipped do not count"
            )
        dtypes = ", ".join(sorted(map(dtype_name, self._dtypes)))
        lines = [f"{self.share:.1%} of the updates were lost to rounding in {dtypes}"]
        worst = sorted(shares.items(), key=lambda item: -item[1])[:5]
        return "\n".join(lines + [f"  {name}: {share:.1%}" for name, share in worst])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if makes_step_of(self._optimizer, optimizer):
            self._steps.begin(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        counted = self._steps.end(optimizer)
        names = self._names.of([each.param for each in counted], self._optimizer)
        for name, each in zip(names, counted, strict=True):
            self._counts[name] = each.counts + self._counts.get(name, 0)
            self._dtypes.add(each.dtype)


def _share(counts: Tensor) -> float:
    updates, lost = counts.tolist()
    return lost / updates if updates else float("nan")
