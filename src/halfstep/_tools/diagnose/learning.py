"""Small steps on the batch of a replay: whether the loss falls with a cure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import torch
from torch import Tensor, nn

from halfstep._pytorch import modes
from halfstep._tools.replay.observer import OpObserver
from halfstep._tools.replay.replay import Replayer
from halfstep._tools.replay.variant import Variant

STEPS = 4
"""The number of steps."""
_RATE = 0.01
"""The length of a step, as a share of the norm of a parameter."""
_LEAST_SIZE = 0.01
"""The size of the entries of a parameter that is smaller, such as a bias of zeros."""


Change = Callable[[], AbstractContextManager[object]]
"""A function that returns a context in which the user's code is changed."""


def losses_with(
    replayer: Replayer, scale: float | None, change: Change, judge: Change | None = None
) -> tuple[float, ...]:
    """Return the loss before and after each of some steps of gradient descent on the batch.

    Each parameter moves against its gradient by a hundredth of its norm, so that neither the scale
    nor the size of the loss matters. Nothing is left of it: each step is a replay. With ``judge``,
    the losses are those of that change. Empty if a loss is not finite, or if there is no loss or
    no parameter to move.
    """
    moves: dict[int, tuple[Tensor, Tensor]] = {}
    losses: list[float] = []
    for _ in range(STEPS + 1):
        ends = _Ends()
        with replayer.run(Variant(scale=scale), ends, _moved(moves, change())) as run:
            error = run.error
        judged = ends if judge is None else _Ends()
        if judge is not None:
            with replayer.run(Variant(scale=scale), judged, _moved(moves, judge())) as run:
                error = error or run.error
        if error is not None or not math.isfinite(judged.loss):
            return ()
        losses.append(judged.loss)
        with modes.unseen_by_modes(), torch.no_grad(), suppress(Exception):
            for leaf, gradient in ends.gradients.values():
                move = _move(leaf, gradient)
                before = moves.get(id(leaf), (leaf, torch.zeros_like(move)))[1]
                moves[id(leaf)] = leaf, before + move
        if not moves:
            return ()
    return tuple(losses)


class _Ends(OpObserver):
    """Observer of the first loss of a step, and of the gradients of its parameters."""

    def __init__(self) -> None:
        self.loss = math.nan
        self.gradients: dict[int, tuple[Tensor, Tensor]] = {}

    def see_loss(self, loss: Tensor) -> None:
        if math.isnan(self.loss) and loss.numel() == 1:  # the scaler shows it before it is scaled
            self.loss = float(loss.detach())

    def see_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        if isinstance(leaf, nn.Parameter):
            self.gradients[id(leaf)] = leaf, gradient.detach().clone()


def _move(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Return the step of a parameter. Entries of its gradient that are not finite do not move."""
    direction = gradient.float().nan_to_num(0.0, 0.0, 0.0)
    size = max(float(leaf.detach().float().norm()), _LEAST_SIZE * leaf.numel() ** 0.5)
    norm = float(direction.norm())
    return direction * (-_RATE * size / norm) if norm else torch.zeros_like(direction)


@contextmanager
def _moved(
    moves: dict[int, tuple[Tensor, Tensor]], around: AbstractContextManager[object]
) -> Iterator[None]:
    """Move parameters for the time of a replay, which restores them."""
    with torch.no_grad():
        for leaf, move in moves.values():
            leaf.add_(move)
    with around:
        yield
