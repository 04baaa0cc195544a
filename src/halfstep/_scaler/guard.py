"""Skipping of steps with inf or NaN gradients, for training without loss scaling."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import (
    Replacements,
    evaluates_first,
    members,
    name,
    require_optimizer,
    split_closure,
    with_closure,
)
from halfstep._pytorch.modes import is_fake
from halfstep._pytorch.optim import tell_scheduler
from halfstep._scaler.alarm import Alarm, OnSkips, SkipReport
from halfstep._scaler.clipping import checked_max_norm
from halfstep._scaler.journal import THIS_THREAD, Journal
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import Counts, Outcome
from halfstep._scaler.scale_state import Static
from halfstep._scaler.scaler import GradScaler
from halfstep.errors import CallOrderError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def guard(
    optimizer: torch.optim.Optimizer,
    max_norm: float | None = None,
    on_skips: OnSkips = "warn",
    module: torch.nn.Module | None = None,
    process_group: ProcessGroup | DeviceMesh | Literal["local"] | None = None,
) -> Guard:
    """Skip the steps of an optimizer whose gradients are inf or NaN, without scaling a loss.

    This is for bfloat16 and float32, which need no scale. It replaces ``optimizer.step`` on the
    instance, so it works in any framework, and does the same as :class:`GradScaler` with a scale of
    1: it checks all gradients in one pass, clips them in the same pass, and synchronizes the
    decision between the ranks that train together. A skipped step leaves parameters and state
    unchanged. Steps on meta and fake tensors, which have no values, are made as without a guard.

    A closure is evaluated once, before the step.

    Args:
        optimizer: The optimizer. It is changed in place; :meth:`Guard.remove` undoes that.
        max_norm: Clip the norm of the gradients to this value; ``math.inf`` only measures it. None
            does neither.
        on_skips: The action at every skipped step: ``"raise"``, or a function that takes a report,
            as for :class:`GradScaler`. ``"warn"`` warns of the 1st, 2nd, 4th, 8th, ... only.
        module: The module that supplies the names of the parameters, and whose buffers a skipped
            step restores, as for :class:`GradScaler`.
        process_group: The ranks that decide together, as for :class:`GradScaler`.

    Returns:
        The guard, for the outcomes of the steps.

    Raises:
        CallOrderError: The optimizer already has a guard. Or, at a step: it evaluates the closure
            after it has changed parameters, like SAM.
        TypeError: The argument is not an optimizer.
        ValueError: It evaluates its closure several times in a step (LBFGS), or ``max_norm`` is
            negative.

    Sync: one for each step; none for an optimizer that skips on the device, such as fused ones.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> guarded = guard(optimizer, on_skips=lambda report: None)
        >>> for x in (1.0, float("nan"), 1.0):
        ...     optimizer.zero_grad()
        ...     model(torch.full((1, 2), x)).sum().backward()
        ...     optimizer.step()
        >>> counts = guarded.counts()
        >>> counts.taken, counts.skipped
        (2, 1)
    """
    require_optimizer("guard", optimizer)
    if is_guarded(optimizer):
        raise CallOrderError(f"guard({type(optimizer).__name__}): it has a guard already")
    if any(isinstance(member, torch.optim.LBFGS) for member in members(optimizer)):
        raise ValueError(
            "guard(LBFGS): it evaluates its closure several times in a step. GradScaler("
            "init_scale=1.0, schedule=halfstep.Static()) checks each: "
            "scaler.step(optimizer, closure)"
        )
    scaler = GuardScaler(on_skips, module, process_group)
    return Guard(optimizer, scaler, None if max_norm is None else checked_max_norm(max_norm))


class GuardScaler(GradScaler):
    """The scaler of a guard: its scale is 1, and it scales no loss."""

    def __init__(
        self,
        on_skips: OnSkips,
        module: torch.nn.Module | None,
        process_group: ProcessGroup | DeviceMesh | Literal["local"] | None,
    ) -> None:
        super().__init__(
            init_scale=1.0,
            schedule=Static(),
            min_scale=1.0,
            module=module,
            process_group=process_group,
        )
        self._alarm = _Alarm(on_skips)


SAID: set[object] = set()  # by all guards here: a script may make an optimizer for each task


class _Alarm(Alarm):
    """An alarm about every skipped step; it warns of the 1st, 2nd, 4th, 8th, ... only."""

    _num = _num_reported = 0  # of skipped steps, as far as the host knows

    def __init__(self, on_skips: OnSkips) -> None:
        super().__init__(1, on_skips)
        self._said = SAID

    def sound(self, scale: LossScale, journal: Journal) -> None:
        self._num = scale.state.num_skipped
        super().sound(scale, journal)

    def note(self, skipped_in_a_row: int, depth: int) -> bool:
        num, before = self._num, self._num_reported
        if self.on_skips == "warn":
            num, before = num.bit_length(), before.bit_length()
        return skipped_in_a_row > 0 and num > before

    def speak(self, report: SkipReport, *, is_proven: bool) -> None:
        self._num_reported = self._num
        super().speak(replace(report, scale=None), is_proven=True)


_GUARDED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def is_guarded(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a guard."""
    return optimizer in _GUARDED


class Guard:
    """The guard of an optimizer, with the outcomes of its steps; see :func:`guard`.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> guarded = guard(optimizer, max_norm=1.0)
        >>> optimizer.param_groups[0]["params"][0].grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> guarded.outcome().taken, guarded.outcome().norm
        (True, 5.0)
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: GradScaler, max_norm: float | None
    ) -> None:
        self._optimizer, self._scaler, self._max_norm = weakref.ref(optimizer), scaler, max_norm
        inner, before = optimizer.step, {k: v for k, v in vars(optimizer).items() if k == "step"}
        _GUARDED.add(optimizer)
        self._call: tuple[Any, ...] | None = None
        self._is_removed = False

        def guarded(optimizer: torch.optim.Optimizer, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_removed:  # a later replacement of `step` still calls this one
                return inner(*args, **kwargs)
            if self._call is not None:  # called by the scaler
                args, kwargs = self._call
                return inner(*args, **kwargs)
            return self._step(optimizer, args, kwargs)

        self._replaced = Replacements(optimizer, "guard", "would step with inf and NaN")
        put = self._replaced.put(optimizer, "step", guarded)
        vars(put)["before"] = before  # there, because it references the optimizer, as `put` does
        self._guarded = weakref.ref(put)

    def __repr__(self) -> str:
        return f"Guard({type(self._optimizer()).__name__}, max_norm={self._max_norm})"

    def outcome(self) -> Outcome:
        """Return the outcome of the last step.

        Raises:
            CallOrderError: There was no step with gradients that have values.

        Sync: none; reading the outcome syncs.
        """
        return self._scaler.outcome(self._require_optimizer())

    def counts(self) -> Counts:
        """Return the numbers of taken and skipped steps. Sync: one."""
        return self._scaler.counts()

    def remove(self) -> None:
        """Restore the optimizer's original ``step``; later replacements of it stay in place.

        The module gets back the calls without a hook.
        """
        optimizer = self._require_optimizer()
        if self._is_removed:
            return
        self._is_removed = True
        self._replaced.allow_original()
        self._scaler._engine.buffers.unwatch()
        _GUARDED.discard(optimizer)
        on_top = getattr(vars(optimizer).get("step"), "__func__", None)
        if on_top is not None and on_top is self._guarded():
            del vars(optimizer)["step"]
            vars(optimizer).update(vars(on_top)["before"])

    def _require_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise CallOrderError("the guarded optimizer is gone")
        return optimizer

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        stepping = THIS_THREAD.stepping
        is_scalers = stepping is not None and not isinstance(stepping, GuardScaler)
        if is_scalers or getattr(optimizer, "found_inf", None) is not None:
            raise CallOrderError(
                f"{type(optimizer).__name__} has a guard and is stepped by a GradScaler, which "
                "skips non-finite steps by itself: leave one of them out (guard.remove())"
            )
        tell_scheduler(optimizer)
        loss = None
        closure, args, kwargs = split_closure(args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = with_closure(_closure_of(optimizer, loss), args, kwargs)
        scaler = self._scaler
        params = parameters(optimizer)
        trained = [param for param in params if param.grad is not None]
        with_values = (param for param in trained if not (param.is_meta or is_fake(param)))
        first = next(with_values, None)
        self._call = args, kwargs
        try:
            if first is None:
                if trained or not scaler._engine.ranks_of("step", optimizer, params).is_together:
                    return optimizer.step()
            elif not scaler._engine.loss_scale.is_created:
                scaler._engine.create_scale(first.device)
            result = scaler.step(optimizer, max_norm=self._max_norm)
        except BaseException:
            scaler._engine.end_iteration()  # the next step has its own gradients
            raise
        finally:
            self._call = None
        scaler.update()
        return loss if result is None else result


def _closure_of(optimizer: torch.optim.Optimizer, loss: Any) -> Callable[[], Any]:
    """Return a closure that returns an already computed loss."""
    if evaluates_first(optimizer):
        return lambda: loss
    # Master weights write to 16-bit parameters around the step and around a closure.
    params = [param for param in parameters(optimizer) if param.dtype.itemsize > 2]
    before = [param._version for param in params]

    def again() -> Any:
        if before != [param._version for param in params]:
            raise CallOrderError(
                f"step({name(optimizer)}, closure): it has changed parameters and evaluates the "
                "closure then, as SAM does, but a guard evaluates it once, before the step. Put "
                "the guard on the optimizer inside of this one"
            )
        return loss

    return again
