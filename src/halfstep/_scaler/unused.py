"""The scale of gradients that no step has used, and the error if it has moved when one does.

An optimizer has such gradients if it accumulates over the updates of another one, or if the scale
is set before its step. It is known from its first step on. A gradient that the user has written
or replaced since is the user's, and one that is zero has every scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils.hooks import RemovableHandle, unserializable_hook

from halfstep._gradients.gradients import Seen, is_as_seen, is_nonzero, parameters, seen
from halfstep._gradients.optimizers import name
from halfstep._gradients.scalars import Scalar
from halfstep._pytorch.autograd import after_backward
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.devices import to_device
from halfstep._scaler.iteration import Check, Iteration, Step
from halfstep._scaler.journal import Journal
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import has_its_gradients


@dataclass(eq=False)
class Unused:
    """The unused gradient of a parameter."""

    optimizer: str  # its name
    loss_scale: LossScale
    grad: Seen
    scale: Scalar  # what multiplied it when the scale moved; 1 if it was unscaled
    newest: Scalar  # the scale of what backward() has added to it last; at first `scale`
    check: Check | None  # what unscaled it
    is_alone: bool  # whether no other optimizer has stepped
    is_mixed: bool | Tensor = False  # whether newest was another one
    hook: RemovableHandle | None = None  # detects what backward() adds

    def is_wrong(self, param: Tensor) -> bool | Tensor:
        """Return whether the present scale is not that of the gradient. Sync: none."""
        is_other = self.loss_scale.number() != self.newest
        if is_other is not False and param.grad is not None:  # zeros have every scale
            is_other = is_other & to_device(is_nonzero(param.grad), self.loss_scale.device)
        return self.is_mixed | is_other

    def problem(self) -> str:
        """Return what is wrong with the gradient. Sync: some on a device."""
        then, newest, now = float(self.scale), float(self.newest), self.loss_scale.value()
        if then == 1.0:
            what, cause = "were unscaled", "update() came before a step used them"
        else:
            what, cause = f"were accumulated at scale {then:g}", "the scale moved before their step"
        more = f"others at {newest:g}" if newest != then else f"the scale is {now:g} now"
        example = (
            ". For example, the optimizer steps in every k-th iteration of another one that has "
            "the same GradScaler"
        )
        cure = (
            "use one GradScaler for each cadence: the discriminator that steps in every k-th "
            "iteration gets a GradScaler of its own. Otherwise call zero_grad() after each update()"
        )
        if self.is_alone:
            example, cure = "", "call update() only after step(), or zero_grad() after it"
            if self.check is not None and self.check.on_host(is_here=True):
                example = ": they had inf or NaN, and later ones were added to them"
                cure = "call zero_grad() before the script continues without a step"
        what = f"gradients of {self.optimizer} {what}, and {more}"
        return f"{what}.\nCause: {cause}{example}.\nCure: {cure}"


class UnusedGradients:
    """The unused gradients of the known optimizers."""

    def __init__(self, journal: Journal, loss_scale: LossScale, owner: Callable[[], Any]) -> None:
        self._journal = journal  # contains all optimizers that have stepped
        self._loss_scale, self._owner = loss_scale, owner
        self.by_param: dict[int, Unused] = {}  # by id

    def before_change(
        self, iteration: Iteration, *, iteration_ends: bool = True
    ) -> list[tuple[Tensor, Unused]]:
        """Return what is unused if the scale changes now. Sync: none."""
        steps, plans = iteration.steps, self._journal.plans
        stepped = [step for step in steps.values() if step.stage is OptState.STEPPED]
        done = {id(s.optimizer) for s in stepped if s.num_losses == iteration.num_losses}
        if len(done) == len(steps) == len(plans) or not self._loss_scale.is_created:
            return []
        # A step has used what was unscaled before or by it, but not what was unscaled afterwards.
        used = {(id(p), check) for s in stepped for p in _params(s) for check in s.checks}
        found = []
        for key, plan in list(plans.items()):
            optimizer, outcome = plan.optimizer(), plan.outcome
            if optimizer is None or outcome is None or key in done:
                continue
            if key not in steps and has_its_gradients(outcome):
                continue
            scale: Scalar | None = None
            for param in parameters(optimizer):
                if param.grad is None or self._left(param) is not None:
                    continue
                entry = iteration.ledger.of(param)
                if entry is not None and (not iteration_ends or (id(param), entry.check) in used):
                    continue
                if scale is None:
                    scale = self._loss_scale.known()
                multiplier = scale if entry is None else 1.0
                as_seen = seen(param.grad)
                check = None if entry is None else entry.check
                arguments = name(optimizer), self._loss_scale, as_seen, multiplier, multiplier
                found.append((param, Unused(*arguments, check, len(plans) == 1)))
        return found

    def after_change(self, found: list[tuple[Tensor, Unused]]) -> None:
        """Remember what :meth:`before_change` has found if the scale has moved. Sync: none."""
        now = self._loss_scale.known() if found else None
        for param, unused in found:
            if isinstance(now, Tensor) or isinstance(unused.scale, Tensor) or unused.scale != now:
                self._forget(param)
                self.by_param[id(param)] = unused
                if param.requires_grad:
                    hook = partial(_before_adding, weakref.ref(unused), weakref.ref(param))
                    unused.hook = param.register_hook(unserializable_hook(hook))  # type: ignore[no-untyped-call]

    def are_gone(self, params: list[Tensor]) -> bool:
        """Return whether no unused gradients of these are left; forget the others. Sync: none."""
        if any(self._left(param) is not None for param in params):
            return False
        for param in params:
            self._forget(param)
        return True

    def use(self, call: str, params: list[Tensor]) -> None:
        """Refuse gradients that are about to be used at another scale than theirs.

        Sync: one on a device if there are gradients that were unused when the scale last changed.
        """
        left = [(unused, param) for param in params if (unused := self._left(param)) is not None]
        flags = [unused.is_wrong(param) for unused, param in left]
        if reduce(or_, flags, False):
            wrong = next(each for (each, _), flag in zip(left, flags, strict=True) if flag)
            self._owner()._refuse(f"{call}: {wrong.problem()}", is_lasting=True)
        for param in params:
            self._forget(param)

    def _left(self, param: Tensor) -> Unused | None:
        """Return what is known of a gradient that nobody has replaced or written since."""
        unused = self.by_param.get(id(param))
        return unused if unused is not None and is_as_seen(unused.grad, param.grad) else None

    def _forget(self, param: Tensor) -> None:
        unused = self.by_param.pop(id(param), None)
        if unused is not None and unused.hook is not None:
            unused.hook.remove()


def _params(step: Step) -> list[Tensor]:
    return [] if step.optimizer is None else parameters(step.optimizer)


@keep_out_of_graphs
def _before_adding(
    unused_ref: weakref.ref[Unused], param_ref: weakref.ref[Tensor], _: Tensor
) -> None:
    """Note, once the running backward pass has ended, that it has added to a gradient."""
    unused, param = unused_ref(), param_ref()
    if unused is None or param is None or not is_as_seen(unused.grad, param.grad):
        return
    newest, is_mixed = unused.loss_scale.number(), unused.is_wrong(param)

    def note() -> None:
        (ref, version), grad = unused.grad, param.grad
        if grad is not None and grad is ref() and grad._version != version:
            unused.grad, unused.newest, unused.is_mixed = (ref, grad._version), newest, is_mixed

    # DistributedDataParallel writes gradients in a callback that it queues later.
    after_backward(lambda: after_backward(note))
