"""Updates of weights that rounding has lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep._master_weights.master_weights import (
    is_rounded_by_chance,
    weight_of,
    with_masters,
)
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch.distributed import local_part
from halfstep._pytorch.modes import is_fake
from halfstep._pytorch.optim import optimizer_step_depth
from halfstep._scaler.optimizers import Names, makes_step_of, members, require_optimizer
from halfstep._scaler.scalars import moved


class Counted(NamedTuple):
    """What became of the updates of one parameter in one step."""

    param: Tensor
    dtype: torch.dtype  # of the weight behind it
    counts: Tensor  # updates, and those that were lost, [2], int64


class _Before(NamedTuple):
    """A parameter before a step."""

    param: Tensor
    weight: Tensor  # what is looked at of the weight behind it
    has_gradient: Tensor | None  # by entry, whether it is not zero; None if a closure will tell
    is_moved: Tensor | bool  # whether the learning rate is not zero


class StepUpdates:
    """The weights of an optimizer before a step, to be counted after it.

    Sparse gradients do not count, nor do weights that are rounded by chance, those with a learning
    rate of 0, as in the first step of a warm-up, nor tensors without values. Sync: none.

    Args:
        optimizer: The optimizer. One that is given ``found_inf`` skips the step by itself: then
            nothing counts.
        has_closure: Whether a closure makes the gradients during the step: the last ones count.
            Else those before it do, since the step may set them to zero.
        part: Returns the entries of a tensor that are looked at.
    """

    @torch.no_grad()
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        has_closure: bool,
        part: Callable[[Tensor], Tensor],
    ) -> None:
        # One around another has no weights of its own behind the parameters.
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
                    and not is_rounded_by_chance(self._optimizer, param)
                ):
                    rate = group.get("lr", 1.0)
                    is_moved = rate.ne(0.0) if isinstance(rate, Tensor) else rate != 0.0
                    before = self._looked_at(param).clone()
                    self._before.append(_Before(param, before, has_gradient, is_moved))

    def _looked_at(self, param: Tensor) -> Tensor:
        return self._part(local_part(weight_of(self._optimizer, param)))

    def _has_gradient(self, param: Tensor) -> Tensor | None:
        """Return which entries have a gradient that is not zero, None without one to look at."""
        grad = param.grad
        if grad is None or grad.layout is not torch.strided:
            return None
        return self._part(local_part(grad)) != 0

    @torch.no_grad()
    def counted(self) -> list[Counted]:
        """Return the counts of the step that has been made since."""
        found = []
        for param, before, has_gradient, is_moved in self._before:
            if has_gradient is None:
                has_gradient = self._has_gradient(param)
            after = self._looked_at(param)
            if has_gradient is None or not has_gradient.shape == after.shape == before.shape:
                continue
            is_lost = has_gradient & (after == before)
            counts = torch.stack([has_gradient.sum(), is_lost.sum()])
            for flag in (self._is_taken, is_moved):
                if flag is not None:
                    counts *= moved(flag, counts.device) if isinstance(flag, Tensor) else flag
            found.append(Counted(param, before.dtype, counts))
        return found


class OpenSteps:
    """The steps that have begun and have not ended, of each optimizer the outermost.

    The step of a class may call that of its base class, and that of an optimizer around another one
    calls that of this one: all have hooks. That of a container does not count: those of the
    optimizers that it holds do.
    """

    def __init__(self, part: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        self._part = part
        self._open: dict[int, tuple[int, torch.optim.Optimizer, StepUpdates]] = {}

    def begin(
        self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Note the weights before a step, called from a hook of it, with what the hook is given."""
        depth = optimizer_step_depth()
        for outer_depth, outer, _ in self._open.values():
            # One that is not further out was left by an exception.
            if outer_depth < depth and makes_step_of(outer, optimizer):
                return
        held = (each for each in members(optimizer) if each is not optimizer)
        if any(isinstance(each, torch.optim.Optimizer) for each in held):
            return
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        step = StepUpdates(optimizer, has_closure, self._part)
        self._open[id(optimizer)] = depth, optimizer, step

    def end(self, optimizer: torch.optim.Optimizer) -> list[Counted]:
        """Return the counts of a step, called from a hook after it; none for one inside of it."""
        found = self._open.get(id(optimizer))
        if found is None or found[0] != optimizer_step_depth():
            return []
        del self._open[id(optimizer)]
        return found[-1].counted()

    def clear(self) -> None:
        self._open.clear()


class LostUpdates:
    """What became of the updates of the weights in a block; see :func:`lost_updates`.

    An update is lost if its gradient is not zero and the weight does not move: it was smaller than
    half a unit in the last place of the weight. Sync: one for each parameter when a share is read.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module | None) -> None:
        require_optimizer("lost_updates", optimizer)
        self._optimizer = optimizer
        self._names = Names()
        if module is not None:
            self._names.watch(module)
        self._hooks = ExitStack()
        self._steps = OpenSteps()
        self._counts: dict[str, Tensor] = {}
        self._dtypes: set[torch.dtype] = set()

    def __enter__(self) -> LostUpdates:
        """Begin to count."""
        # Those of one optimizer are not enough: what wraps or holds optimizers may have none.
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        self._hooks.close()
        self._steps.clear()

    @property
    def share(self) -> float:
        """The share of all updates that were lost, 0 to 1; NaN without any update."""
        counts = [each.cpu() for each in self._counts.values()]
        return _share(torch.stack(counts).sum(0)) if counts else float("nan")

    @property
    def shares(self) -> dict[str, float]:
        """The same for each parameter, by its name."""
        return {name: _share(counts) for name, counts in self._counts.items()}

    def __str__(self) -> str:
        """Return a sentence, and a line for each of the parameters that lost most."""
        shares = {name: share for name, share in self.shares.items() if share == share}
        if not shares:
            return (
                "no updates were seen: optimizer.step() belongs in the block. Steps that are "
                "skipped do not count, nor does store='stochastic', which loses none on average"
            )
        dtypes = ", ".join(sorted(map(dtype_name, self._dtypes)))
        lines = [f"{self.share:.1%} of the updates were lost to rounding in {dtypes}"]
        worst = sorted(shares.items(), key=lambda item: -item[1])[:5]
        return "\n".join(lines + [f"  {name}: {share:.1%}" for name, share in worst])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if makes_step_of(self._optimizer, optimizer):
            self._steps.begin(optimizer, args, kwargs)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        counted = self._steps.end(optimizer)
        names = self._names.of([each.param for each in counted], self._optimizer)
        for name, each in zip(names, counted, strict=True):
            self._counts[name] = each.counts + self._counts.get(name, 0)
            self._dtypes.add(each.dtype)


def lost_updates(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None = None
) -> LostUpdates:
    """Count the updates that rounding loses, in a block with one step or more.

    Args:
        optimizer: Any optimizer of PyTorch's interface, or what wraps or holds such. With master
            weights it is the float32 weights that are looked at, of which next to none are lost.
        module: Gives the parameters their names.

    Returns:
        A context manager, whose ``share`` and ``shares`` (by parameter) are the shares, 0 to 1, of
        the entries whose gradient was not zero and whose weight did not move. Steps that a
        GradScaler skips do not count, nor do those with a learning rate of 0, nor sparse gradients,
        nor the weights of ``store="stochastic"``, which are right on average. Of a closure it is
        the last gradients that count. Of DTensors, what this rank holds.

    Memory: a copy of the weights for the time of a step. Sync: none before the shares are read.

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


def _share(counts: Tensor) -> float:
    updates, lost = counts.tolist()
    return lost / updates if updates else float("nan")
