"""Steps with a closure: scale, backward, unscale and check inside every evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep._gradients.gradients import NONE, is_as_seen, parameters, seen
from halfstep._gradients.optimizers import (
    Closure,
    evaluates_first,
    handles_scale,
    is_pytorchs,
    name,
    with_closure,
)
from halfstep._scaler.after_step import backup_of
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Decided, Gathered, Iteration, Remembered, Stage
from halfstep._scaler.journal import Journal, Memory
from halfstep._scaler.ledger import GradientCheck
from halfstep._scaler.outcome import has_its_gradients
from halfstep._scaler.step import (
    clip_coefficient_of,
    gather,
    measure,
    multiply_,
    read,
    refuse_half,
    remember,
    remember_failure,
    require_not_stepped,
    unscale_,
)
from halfstep.errors import CallOrderError


class UnusableEvaluationError(Exception):
    """Raised inside ``optimizer.step`` to leave it when the gradients of a closure are unusable."""


def step_with_closure(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    closure: Closure,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_norm: float | None,
) -> Any:
    """Call ``optimizer.step`` with a closure that yields unscaled, finite gradients.

    New gradients, of a loss that was scaled before the call, are unscaled, checked and clipped too:
    SAM uses them before it evaluates the closure. PyTorch's optimizers do not, so there the closure
    may also add to them. Gradients of an earlier step or evaluation are dropped. Non-finite
    gradients end the step, which returns None; the parameters and the state of the optimizer are
    restored. They are also restored if the closure raises. Sync: one for each evaluation, and one
    for gradients from before that are used.
    """
    earlier = engine.iteration.step_of(optimizer)
    require_not_stepped(earlier)
    evaluations = _Evaluations(engine, optimizer, closure, max_norm)
    before = backup_of(optimizer)
    result = None
    try:
        evaluations.begin(earlier)
        args, kwargs = with_closure(evaluations, args, kwargs)
        result = optimizer.step(*args, **kwargs)
        evaluations.used()
    except UnusableEvaluationError:
        before.restore()
    except BaseException:
        before.restore()
        engine.buffers.restore(1.0)
        evaluations.give_up()
        raise
    evaluations.finish()
    return result


class _Evaluations:
    """The callable that replaces the user's closure.

    Each evaluation is an iteration of its own, and is merged into the surrounding iteration after
    the step. So a step that raises leaves no trace, and every evaluation may unscale the gradients.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        closure: Closure,
        max_norm: float | None,
    ) -> None:
        self.last: Decided | None = None  # with the gradients that the optimizer uses
        self._iteration = Iteration()  # of the last evaluation
        self._earlier: list[GradientCheck] = []  # of evaluations whose gradients are gone
        # New gradients from before the step, until an evaluation makes others.
        self._held: list[tuple[Tensor, Tensor]] = []
        # Of the current evaluation, by id of the parameter: the versions of these before it, and
        # which of the parameters a backward pass has reached.
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self._reached: set[int] = set()
        self._were_unscaled = False
        self._starts_without = False  # the current evaluation, gradients
        self._engine = engine
        self._optimizer = optimizer
        self._closure = closure
        self._max_norm = max_norm

    def begin(self, earlier: Remembered | None) -> None:
        """Prepare the new gradients of scaled losses for the optimizer; drop all others."""
        engine, optimizer = self._engine, self._optimizer
        self._were_unscaled = earlier is not None and earlier.stage is Stage.UNSCALED
        if not self._were_unscaled:
            drop_used(engine.journal, optimizer)
        held = [(param, param.grad) for param in parameters(optimizer) if param.grad is not None]
        is_waiting = bool(engine.unused.by_param)
        if not (held and (self._were_unscaled or is_waiting or engine.iteration.num_losses)):
            drop_gradients(optimizer)
        elif is_pytorchs(optimizer) and not self._were_unscaled:
            engine.unused.use("step", [param for param, _ in held], engine.owner()._refuse)
            self._held = held
        else:
            self._use_held()

    def __call__(self) -> Any:
        if not self._held:
            self._forget_last_gradients()
            drop_gradients(self._optimizer)
            self._starts_without = True
        self._versions = {id(param): (grad, grad._version) for param, grad in self._held}
        self._reached = set()
        around = self._engine.iteration
        inner = self._engine.iteration = Iteration()
        try:
            with before_backward([param for param, _ in self._held], self._note_backward):
                loss = self._backward(inner, around)
            if inner.num_losses:
                self._use_new_gradients(inner)
            else:
                self._put_back()
        finally:
            self._engine.iteration = around
            inner.ledger.close()
        return loss.detach() if isinstance(loss, Tensor) else loss

    def used(self) -> Decided:
        """Return the step with the gradients that the optimizer uses.

        Raises:
            CallOrderError: There are none.
        """
        if self.last is None:
            raise CallOrderError(
                f"step({name(self._optimizer)}, closure): the optimizer did not call the closure, "
                "and there are no gradients of a scaled loss. Call scaler.scale(loss).backward() "
                "before step(), without a closure"
            )
        return self.last

    def finish(self) -> None:
        """Record the step, and the closure's losses and checks, in the surrounding iteration."""
        iteration = self._engine.iteration
        # The scale of the closure's losses also applies to other optimizers that use its last
        # gradients.
        iteration.num_losses += self._iteration.num_losses
        for check in self._earlier:
            iteration.ledger.mark(NONE, check)
        iteration.ledger.take_over(self._iteration.ledger.entries)
        is_fused = handles_scale(self._optimizer)
        memory = self._engine.journal.memory(self._optimizer)
        remember(self._engine, self._optimizer, self.used(), memory, is_fused=is_fused)
        note_used(self._optimizer, memory)

    def give_up(self) -> None:
        """Restore the gradients from before a step that raised; drop those of an evaluation."""
        if self._held and self.last is not None:
            self._put_back()
            remember_failure(self._engine.iteration, self.last.checked)
        elif self._starts_without:
            drop_gradients(self._optimizer)

    def _put_back(self) -> None:
        for param, grad in self._held:
            param.grad = grad

    def _note_backward(self, param: Tensor) -> None:
        """Note that backward will add to a gradient; raise, before it does, if it must not."""
        if self._is_from_before(param) and not self._can_be_added_to():
            raise self._added_to_error()
        self._reached.add(id(param))

    def _is_from_before(self, param: Tensor) -> bool:
        """Return whether the closure has not replaced the gradient, or set it to zero."""
        grad, version = self._versions[id(param)]
        return param.grad is grad and (grad._version == version or id(param) in self._reached)

    def _can_be_added_to(self) -> bool:
        # LBFGS would have them in the first evaluation only.
        return evaluates_first(self._optimizer) and not self._were_unscaled

    def _added_to_error(self) -> CallOrderError:
        call = f"step({name(self._optimizer)}, closure)"
        if self._were_unscaled:
            return CallOrderError(
                f"{call}: {Stage.UNSCALED.value} since the last update(), and the closure makes "
                "new ones. Call unscale_() or clip_grad_norm_() in the closure, or step() without "
                "a closure"
            )
        return CallOrderError(
            f"{call}: there are gradients from before the step, and the closure keeps them or adds "
            "to them. Call zero_grad() first in the closure, and every backward() after it"
        )

    def _forget_last_gradients(self) -> None:
        """Forget the gradients in favor of new ones; keep the checks for the scale."""
        self._earlier += self._iteration.checks
        if self.last is not None and self.last.checked.own is not None:
            self._earlier.append(self.last.checked.own)
        self.last, self._iteration, self._held = None, Iteration(), []

    @torch.enable_grad()
    def _backward(self, inner: Iteration, around: Iteration) -> Any:
        """Call the closure; unless it has made gradients, or needs none, make them."""
        call = f"step({name(self._optimizer)}, closure)"
        loss = self._closure()
        earlier = inner.step_of(self._optimizer)
        has_stepped = earlier is not None and earlier.stage is Stage.STEPPED
        if self._engine.iteration is not inner or has_stepped:
            raise CallOrderError(
                f"{call}: the closure called step() or update(). Call update() once, after the step"
            )
        if inner.num_losses:
            return loss
        others = (p for p in parameters(self._optimizer) if id(p) not in self._versions)
        if self._reached or any(param.grad is not None for param in others):
            raise CallOrderError(
                f"{call}: the closure called backward() on a loss that was not scaled. Call "
                "scaler.scale(loss).backward() in it, or only return the loss and leave backward() "
                "to step()"
            )
        if self._held and is_value(loss, around):
            self._put_back()
            if self.last is None:
                self._engine.iteration = around
                self._use_held()
            self._require_finite(loss)
        elif isinstance(loss, Tensor):
            self._engine.scale(loss).backward()
        else:
            raise TypeError(
                f"{call}: the closure returned {type(loss).__name__} and scaled no loss. Return "
                "the loss, or call scaler.scale(loss).backward() in the closure"
            )
        return loss

    def _require_finite(self, loss: Tensor | float) -> None:
        """Leave the step if a loss by which the optimizer decides is inf or NaN."""
        if not torch.as_tensor(loss).isfinite().all():
            checked = self.used().checked
            scale = checked.gathered.loss_scale
            scale.mark_loss_bad()
            found_inf = {scale.device: torch.ones((), device=scale.device)}
            self.last = replace(checked, own=GradientCheck(scale, found_inf)).decide()
            raise UnusableEvaluationError

    def _use_held(self) -> None:
        """Unscale, check and clip the gradients from before the step."""
        gathered = self._gather()
        self._use(gathered, always_measures=True)
        gradients = gathered.gradients
        self._held = list(zip(gradients.params, gradients.grads, strict=True))

    def _use_new_gradients(self, inner: Iteration) -> None:
        if self._held and self._were_unscaled and is_pytorchs(self._optimizer):
            raise self._added_to_error()
        is_from_before = any(self._is_from_before(param) for param, _ in self._held)
        if is_from_before and not self._can_be_added_to():
            raise self._added_to_error()
        if self._held:
            self._forget_last_gradients()
        self._iteration = inner
        self._use(self._gather())

    def _gather(self) -> Gathered:
        optimizer = self._optimizer
        params = parameters(optimizer)
        return gather(self._engine, "step", optimizer, params, optimizer, needs_one=True)

    def _use(self, gathered: Gathered, always_measures: bool = False) -> None:
        """Unscale, check and clip gradients; leave the step if they are not usable.

        ``always_measures``: leave non-finite gradients unchanged.
        """
        refuse_half(self._engine, gathered)
        if self._max_norm is None and not always_measures:
            checked = unscale_(gathered)
        else:
            checked = measure(gathered)
        coefficient = clip_coefficient_of(checked, self._max_norm)
        self.last = checked.decide()
        self.last, _ = read(self.last)
        if self.last.skip:
            raise UnusableEvaluationError
        self.last = replace(self.last, checked=multiply_(checked, coefficient))


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set all gradients of an optimizer to None."""
    for param in parameters(optimizer):
        param.grad = None


def note_used(optimizer: torch.optim.Optimizer, memory: Memory) -> None:
    """Remember the current gradients, which the optimizer has used. Sync: none."""
    used = {id(p): p.grad for p in parameters(optimizer) if p.grad is not None}
    memory.stepped_gradients = dict(zip(used, seen(used.values()), strict=True))


def drop_used(journal: Journal, optimizer: torch.optim.Optimizer) -> None:
    """Set the gradients to None that are still those of the last step. Sync: none."""
    outcome, memory = journal.last(optimizer), journal.memories.get(id(optimizer))
    if memory is None or not memory.stepped_gradients:
        if outcome is not None and has_its_gradients(outcome):
            drop_gradients(optimizer)
        return
    for param in parameters(optimizer):
        earlier = memory.stepped_gradients.get(id(param))
        if earlier is not None and is_as_seen(earlier, param.grad):
            param.grad = None


@contextmanager
def before_backward(params: list[Tensor], function: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with each parameter that a backward pass is about to add to."""
    hooks: list[RemovableHandle] = []
    for param in params:
        if param.requires_grad:
            hook = partial(_call, function, weakref.ref(param))
            hooks.append(param.register_hook(hook))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _call(function: Callable[[Tensor], None], ref: weakref.ref[Tensor], _: Tensor) -> None:
    param = ref()
    if param is not None:
        function(param)


def is_value(loss: object, around: Iteration) -> bool:
    """Return whether a closure has only computed the loss, for gradients that exist already.

    A line search evaluates losses in ``no_grad``; a Polyak step size takes the loss of the backward
    pass before the step.
    """
    if isinstance(loss, Tensor):
        newest = around.newest_loss
        return not loss.requires_grad or (newest is not None and newest() is loss)
    return isinstance(loss, int | float)
