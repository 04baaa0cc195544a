"""Run a batch again at the smaller scale instead of losing it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfstep._common.random_states import RandomStates
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler.checks import checked_count
from halfstep._scaler.engine import Engine
from halfstep._scaler.gradients import parameters
from halfstep._scaler.optimizers import name
from halfstep._scaler.scale_state import Reason
from halfstep.errors import CallOrderError


def retry(engine: Engine, optimizer: torch.optim.Optimizer, times: int) -> Iterator[int]:
    """Return the numbers of the attempts: 0, and more as long as a smaller scale may help.

    See :meth:`halfstep.GradScaler.retry`.
    """
    return _attempts(engine, optimizer, checked_count("times", times, at_least=0))


@keep_out_of_graphs
def _attempts(engine: Engine, optimizer: torch.optim.Optimizer, times: int) -> Iterator[int]:
    modules = engine.names.modules()
    params = [*parameters(optimizer), *(p for module in modules for p in module.parameters())]
    randomness, buffers = RandomStates({p.device for p in params}), Buffers(modules)
    for attempt in itertools.count():
        seen = engine.journal.last(optimizer)
        yield attempt
        outcome = engine.journal.last(optimizer)
        if outcome is None or outcome is seen or not outcome.has_ended:
            raise CallOrderError(
                f"retry({name(optimizer)}): the loop must call scaler.step(optimizer) and "
                "scaler.update() for this optimizer, so that it is known whether the step was taken"
            )
        if attempt == times or outcome.reason is not Reason.OVERFLOW:
            return
        if outcome.scale_after == outcome.scale:
            return  # a static scale, or one that forgives: the same would happen again
        randomness.restore()
        buffers.restore()
        optimizer.zero_grad()


class Buffers:
    """The buffers of modules: which there are, and what is in them."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        # As dicts: a module may put another tensor, or None, in the place of a buffer.
        dicts = [submodule._buffers for module in modules for submodule in module.modules()]
        self._present = [(buffers, dict(buffers)) for buffers in dicts]
        self._values = [
            (buffer, buffer.detach().clone())
            for buffers in dicts
            for buffer in buffers.values()
            if buffer is not None and _is_writable(buffer)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of them back."""
        for buffers, present in self._present:
            buffers.clear()
            buffers.update(present)
        for buffer, value in self._values:
            buffer.copy_(value)


def _is_writable(buffer: Tensor) -> bool:
    # An expanded tensor cannot be written to, and so nobody has.
    return buffer.layout is not torch.strided or 0 not in buffer.stride() or buffer.numel() < 2
