"""The disabled scaler."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep._gradients.gradients import collect, parameters
from halfstep._gradients.scalars import checked_count
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler import clipping
from halfstep._scaler.after_step import Count, check_count
from halfstep._scaler.agreement import ALONE
from halfstep._scaler.closures import (
    before_backward,
    drop_used,
    is_value,
    note_used,
    split_closure,
)
from halfstep._scaler.iteration import Step
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.rules import Static
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.scaler import GradScaler
from halfstep.errors import RanksError


class DisabledGradScaler(GradScaler):
    """The result of ``GradScaler(enabled=False)``: every method works, and nothing is scaled.

    Gradients are not checked either: every step is taken. To skip inf and NaN without a scale, use
    ``GradScaler(init_scale=1.0, rule=Static())``.
    """

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` unchanged."""
        if isinstance(outputs, Tensor) and not torch.compiler.is_compiling():
            self._engine.iteration.newest_loss = weakref.ref(outputs)
        return outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    @keep_out_of_graphs
    def clip_grad_norm_(
        self,
        optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        per: clipping.Per = "all",
    ) -> Tensor:
        """Clip unscaled gradients; see :meth:`GradScaler.clip_grad_norm_`."""
        optimizer, params = clipping.target(optimizer_or_parameters)
        found = collect(params)
        device = found.values[0].device if found.values else torch.device("cpu")
        try:
            ranks = self._engine.ranks.of("clip_grad_norm_", params, has_scale=True)
        except RanksError:  # a disabled scaler needs no more than PyTorch's clipping
            ranks = ALONE
        step = Step(optimizer, _one(device), found, ranks=ranks)
        return clipping.clip_(
            step,
            clipping.checked_max_norm(max_norm),
            *clipping.checked_kind(norm_type, per),
            self._engine.names,
        )

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Clip if requested, and call ``optimizer.step``, with the closure if there is one."""
        closure, args, kwargs = split_closure(args, kwargs)
        if closure is None:
            if max_norm is not None:
                self.clip_grad_norm_(optimizer, max_norm)
            return optimizer.step(*args, **kwargs)
        kwargs.pop("closure", None)

        memory = self._engine.journal.memory(optimizer)

        @torch.enable_grad()
        def evaluate() -> Any:
            params = parameters(optimizer)
            before = [param.grad for param in params]
            reached: list[Tensor] = []
            with before_backward(params, reached.append):
                loss = closure()
            after = [param.grad for param in params]
            made_new = reached or any(
                new is not None and new is not old for old, new in zip(before, after, strict=True)
            )
            has_value = any(grad is not None for grad in before) and is_value(
                loss, self._engine.iteration
            )
            if isinstance(loss, Tensor) and not (made_new or has_value):
                # The closure leaves backward() to the scaler.
                drop_used(self._engine.journal, optimizer)
                loss.backward()  # type: ignore[no-untyped-call]
            if max_norm is not None:
                self.clip_grad_norm_(optimizer, max_norm)
            note_used(optimizer, memory)
            return loss

        result = optimizer.step(evaluate, *args, **kwargs)
        note_used(optimizer, memory)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Do nothing."""

    def accumulate(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Return a context manager that does nothing: gradients add up as usual."""
        return nullcontext()

    def retry(self, optimizer: torch.optim.Optimizer, times: int = 2) -> Iterator[int]:
        """Return an iterator over 0, the only attempt."""
        checked_count("times", times, at_least=0)
        return iter([0])

    @keep_out_of_graphs
    def outcome(self, optimizer: torch.optim.Optimizer) -> Outcome:
        """Return the outcome of a taken step, with the current gradients."""
        step = Step(optimizer, _one(torch.device("cpu")), collect(parameters(optimizer)))
        step.found_inf = 0.0
        outcome = Outcome(optimizer, self._engine.names, step, None, can_measure_late=True)
        outcome.after = step.loss_scale.snapshot()
        return outcome

    def after_step(
        self,
        optimizer: torch.optim.Optimizer,
        function: Callable[[], object],
        count: Count = "updates",
    ) -> bool:
        """Call the function."""
        check_count(count)
        function()
        return True

    def step_scheduler(self, scheduler: Any, count: Count = "updates", *args: Any) -> bool:
        """Call ``scheduler.step(*args)``."""
        return self.after_step(scheduler.optimizer, lambda: scheduler.step(*args), count)

    def get_scale(self) -> float:
        """Return 1.0."""
        return 1.0

    def is_enabled(self) -> bool:
        """Return False."""
        return False

    def __repr__(self) -> str:
        """Return ``"GradScaler(enabled=False)"``."""
        return "GradScaler(enabled=False)"

    def state_dict(self) -> dict[str, Any]:
        """Return ``{}``."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """Return no flags: nothing is checked."""
        return {}

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str | None) -> None:
        """Do nothing: there is no scale to create."""


@cache
def _one(device: torch.device) -> LossScale:
    scale = LossScale(ScaleState.first(1.0, Static()))
    scale.create(device)
    return scale
