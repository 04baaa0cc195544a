"""Replay of a step from its current state, which is restored afterwards."""

from __future__ import annotations

import gc
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep._autocast import Rule
from halfstep._common.nested import tensors_in, values_reached
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import split_closure
from halfstep._pytorch import amp, autograd, modes
from halfstep._scaler import GradScaler, GuardScaler
from halfstep._scaler.access import begin_anew
from halfstep._tools.measure import is_finite
from halfstep._tools.patches import Around, Patches, ThreadFlag, subclasses, watch_steps
from halfstep._tools.replay import LEFT_GRADIENTS
from halfstep._tools.replay.observer import FoundModules, ObserverMode, OpObserver
from halfstep._tools.replay.undo import UndoLog
from halfstep._tools.replay.variant import EnteredAutocast, Variant, autocast_as
from halfstep._tools.user_code import owners_in
from halfstep.events import PolicyOnDevice, unobserved

_ALWAYS = 2  # the number of replays that are made even if they take too long

BY_HAND = 16.0  # the smallest factor of a loss that counts as its scale


@dataclass
class StepRun:
    """Record of one run of a step."""

    scale: float | None = None  # scale of the losses; None if they were not scaled
    by_hand: float | None = None  # the number that the code itself has multiplied a loss by
    backoff: float = 1.0  # by which the scale is multiplied in the next of several steps
    # The autocast regions that the step entered.
    entered: list[EnteredAutocast] = field(default_factory=list)
    error: Exception | None = None  # exception that ended the step, if any
    # The numbers of the ops that multiplied losses by the scale, or of the last two by hand.
    scaling: list[range] = field(default_factory=list)


class ClosureCalledAgain(Exception):  # noqa: N818
    """A step calls a closure again that can only be called once."""


def own_time() -> float:
    """Return the time of this thread and a tenth of that in which it waits, in seconds.

    So a busy machine tries nearly as much, and steps that wait for something come to an end.
    """
    return 0.9 * time.thread_time() + 0.1 * time.perf_counter()


class OutOfTime(Exception):  # noqa: N818  (control flow, not an error)
    """The time for the replays of a step is over."""


class Replayer:
    """Runner of repeated replays of a step.

    Each replay restores the training state: parameters, buffers, gradients, random generators,
    scalers, and everything else that PyTorch or the modules hold. Schedules do not step, nor do
    optimizers, whose closures are called once, unless ``takes_steps``.
    """

    def __init__(
        self, step: Callable[[], object], model: nn.Module | None, *, is_kept: bool = False
    ) -> None:
        # A step of kept calls starts without gradients, and may end before the backward pass if the
        # loss is bad. A user's function may not: it may have a hook or a flag to reset.
        self.is_kept = is_kept
        self._step, self._outermost, self.model = step, model, model
        self._owners = owners_in(step)
        self._mode: ObserverMode | None = None
        self._left: list[tuple[Tensor, Tensor]] = []  # gradients that the step does not clear
        self._without_gradient: list[Tensor] = []
        self.num_replays = 0
        # Whether replays carry out the steps of optimizers, if it has_steps.
        self.takes_steps = self.has_steps = False
        self.limit = math.inf  # own seconds, after which no replay but the first two begins
        self.notes: list[str] = []
        self._begun, self._begun_own = time.perf_counter(), own_time()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def own_seconds(self) -> float:
        """The time of the replays that counts for the limit."""
        return own_time() - self._begun_own

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose state is saved at the start of a replay."""
        found = [self._outermost, *(o for o in self._owners if isinstance(o, nn.Module))]
        return [module for module in found if module is not None]

    def drop_bad_gradients(self) -> None:
        """Start further replays without existing gradients that are not finite.

        They are left over from an earlier bad step, and no cure of this step can fix them.
        """
        self._without_gradient = [leaf for leaf, grad in self._left if not is_finite(grad)]
        if self._without_gradient:
            self.notes.append(LEFT_GRADIENTS)

    def num_ops(self) -> int:
        return 0 if self._mode is None else self._mode.num_ops

    def observe(
        self, op: str, rule: Rule, policy: PolicyOnDevice
    ) -> AbstractContextManager[object]:
        return nullcontext() if self._mode is None else self._mode.places.under(op, rule, policy)

    @contextmanager
    def run(
        self,
        variant: Variant,
        observer: OpObserver,
        around: AbstractContextManager[object] | None = None,
        take: Callable[[Callable[[], object], StepRun], object] = lambda step, _: step(),
    ) -> Iterator[StepRun]:
        """Run the step, inside ``around`` if given, and show its ops to an observer.

        ``take`` may run it several times. The results can be read inside the block. Everything is
        restored when it ends. Raises ``OutOfTime`` if the limit is reached.
        """
        if self.num_replays >= _ALWAYS and self.own_seconds > self.limit:
            raise OutOfTime
        self.num_replays += 1
        undo, patches, run = UndoLog(), Patches(), StepRun()
        with ExitStack() as outer:
            outer.enter_context(_without_collector())
            outer.callback(undo.restore)
            for owner in self._owners:
                if isinstance(owner, Optimizer):
                    undo.note_optimizer(owner)
                else:
                    undo.note_model(owner)
            undo.note_grads(self._without_gradient)
            for leaf in self._without_gradient:
                leaf.grad = None
            outer.enter_context(replaying())
            owners = (owner for owner in self._owners if isinstance(owner, nn.Module))
            modules = FoundModules(self._outermost, undo, owners)
            mode = self._mode = ObserverMode(modules, undo, observer, is_alone=True)
            with ExitStack() as stack:
                stack.enter_context(patches)
                if self.is_kept:
                    _stop_when_settled(patches, observer, run)
                watch_backward(patches, observer, begins_without=self.is_kept)
                _suspend_optimizers(patches, observer, self)
                _keep_swapped(patches, undo)
                scaled = _scaled(patches, mode, run, variant.scale, self.is_kept)
                stack.enter_context(scaled)
                run.entered = stack.enter_context(autocast_as(variant, self.model, patches))
                stack.enter_context(mode.active())
                try:
                    with around or nullcontext():
                        result = take(self._step, run)
                    _see_ends(observer, result)
                except _Settled:
                    pass
                except Exception as error:  # raised by the step; the caller decides
                    run.error = error
            self._outermost, self.model = modules.outermost, modules.model
            self._owners += [other for other in modules.others if other not in self._owners]
            self._left = [(p, g) for p, g in undo.grads() if g is not None and p.grad is g]
            self._mode = None
            yield run


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable Python's garbage collector, which the allocations of a replay trigger repeatedly.

    With it, a replay of thousands of small ops takes twice as long.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


_replaying = ThreadFlag()


def is_replaying() -> bool:
    return _replaying.is_on


@contextmanager
def replaying() -> Iterator[None]:
    """Mark the block as a replay, so that recorders and runners ignore it."""
    with _replaying.on(), unobserved():
        yield


def _here(around: Around) -> Around:
    """Apply a patch in this thread only; other threads call the original."""
    thread = threading.get_ident()

    def only_here(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    return only_here


class _Settled(Exception):  # noqa: N818  (control flow, not an error)
    """The result of a replay is known before the step has ended."""


def _stop_when_settled(patches: Patches, observer: OpObserver, run: StepRun) -> None:
    """End a replay before the backward pass if the loss itself is bad."""

    def backward(original: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        if observer.is_settled and not run.scaling:
            raise _Settled
        original(*args, **kwargs)

    patches.wrap(torch.autograd, "backward", _here(backward))


def watch_backward(patches: Patches, observer: OpObserver, *, begins_without: bool = False) -> None:
    """Show an observer the losses that start backward passes, and the gradients when they end.

    If ``begins_without``, a leaf's existing gradient is cleared before the first pass to reach it.
    """
    reached: dict[int, Tensor] = {}

    def backward(original: Callable[..., None], /, tensors: Any, *args: Any, **kwargs: Any) -> None:
        leaves = autograd.leaves_of(list(tensors_in([tensors])))
        observer.undo.note_grads(leaves)
        for leaf in leaves:
            if begins_without and id(leaf) not in reached:
                reached[id(leaf)], leaf.grad = leaf, None
        _see_losses(observer.see_root, [tensors])
        with _seen_before_hooks(observer, leaves):
            original(tensors, *args, **kwargs)
        _see_gradients(observer, ((leaf, leaf.grad) for leaf in leaves))

    def grad(original: Callable[..., Any], /, outputs: Any, inputs: Any, *a: Any, **kw: Any) -> Any:
        _see_losses(observer.see_root, [outputs])
        gradients = original(outputs, inputs, *a, **kw)
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        _see_gradients(observer, zip(given, gradients, strict=True))
        return gradients

    patches.wrap(torch.autograd, "backward", _here(backward))
    patches.wrap(torch.autograd, "grad", _here(grad))


def _see_losses(see: Callable[[Tensor], None], values: Sequence[Any]) -> None:
    with modes.unseen_by_modes(), modes.outside_of_transforms():
        for loss in tensors_in(values):
            see(loss)


def _see_gradients(observer: OpObserver, pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    with modes.unseen_by_modes(), modes.outside_of_transforms():
        for leaf, gradient in pairs:
            if gradient is not None:
                observer.see_gradient(leaf, gradient)


@contextmanager
def _seen_before_hooks(observer: OpObserver, leaves: Iterable[Tensor]) -> Iterator[None]:
    """Show the gradients of leaves before hooks run that may remove them."""

    def see(leaf: Tensor, gradient: Tensor) -> None:
        _see_gradients(observer, [(leaf, gradient)])

    with ExitStack() as stack:
        for leaf in filter(autograd.has_hooks_after_accumulation, leaves):
            stack.callback(leaf.register_hook(partial(see, leaf)).remove)  # type: ignore[no-untyped-call]
        yield


def _see_ends(observer: OpObserver, result: object) -> None:
    """Show the results of a step, and the gradients that remain after it."""
    with modes.unseen_by_modes():
        for value in values_reached(result, (nn.Module, Optimizer)):
            observer.see_result(value)
        for leaf, before in observer.undo.grads():
            if leaf.grad is not None:
                observer.see_remaining(leaf, leaf.grad, is_new=leaf.grad is not before)


def _keep_swapped(patches: Patches, undo: UndoLog) -> None:
    """Save a module before ``functional_call`` swaps in other parameters."""

    def call(original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        undo.note_model(module)
        return original(module, *args, **kwargs)

    patches.wrap(*modes.FUNCTIONAL_CALL, _here(call))


def _suspend_optimizers(patches: Patches, observer: OpObserver, replayer: Replayer) -> None:
    """Disable steps of optimizers and schedules, and save gradients before they are zeroed."""

    def step(original: Any, optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        replayer.has_steps = True
        if replayer.takes_steps:
            observer.undo.note_optimizer(optimizer)
            with modes.unseen_by_modes():
                observer.before_step(optimizer)
            result = None
            with suppress(ClosureCalledAgain):
                result = original(optimizer, *args, **kwargs)
            with modes.unseen_by_modes():
                observer.see_step(optimizer)
            return result
        closure, *_ = split_closure(args, kwargs)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        _see_gradients(observer, ((param, param.grad) for param in _parameters(optimizer)))
        return loss

    def stay(original: Any, /, *args: Any, **kwargs: Any) -> None:
        return None

    def zero_grad(original: Callable[..., None], owner: Any, /, *args: Any, **kwargs: Any) -> None:
        observer.undo.note_grads(_parameters(owner))
        original(owner, *args, **kwargs)

    watch_steps(patches, _here(step), lambda _: None)
    for cls in (LRScheduler, *subclasses(LRScheduler)):
        if "step" in vars(cls):
            patches.wrap(cls, "step", _here(stay))
    for owner in (nn.Module, Optimizer, *subclasses(Optimizer)):
        if "zero_grad" in vars(owner):
            patches.wrap(owner, "zero_grad", _here(zero_grad))


def _parameters(owner: Any) -> Iterable[Tensor]:
    return owner.parameters() if isinstance(owner, nn.Module) else parameters(owner)


@contextmanager
def _scaled(
    patches: Patches, mode: ObserverMode, run: StepRun, scale: float | None, may_end_early: bool
) -> Iterator[None]:
    """Restart every scaler, at ``scale`` if given; restore the scalers after the block.

    Without a scaler, ``scale`` replaces the number by which the code itself multiplies a loss.
    """
    before: dict[int, tuple[Any, dict[str, Any]]] = {}

    def restart(scaler: Any, new: float | None) -> None:
        before[id(scaler)] = (scaler, dict(vars(scaler)))
        with modes.unseen_by_modes():  # keeps op numbers equal in all replays
            if not isinstance(scaler, GuardScaler):
                run.scale = scaler.get_scale() if new is None else new
            again = amp.restart_scaler if isinstance(scaler, TorchGradScaler) else begin_anew
            again(scaler, new if new is None else new * run.backoff)

    def step(original: Any, scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(scaler, GuardScaler) and id(scaler) not in before:
            restart(scaler, None)
        return original(scaler, *args, **kwargs)

    def multiply(original: Any, scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
        if id(scaler) not in before and scaler.is_enabled():
            restart(scaler, scale)
        _see_losses(mode.observer.see_loss, args[:1])
        if may_end_early and mode.observer.is_settled:
            raise _Settled
        first = mode.num_ops
        result = original(scaler, *args, **kwargs)
        run.scaling.append(range(first, mode.num_ops))
        return result

    def backward(
        original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        with modes.unseen_by_modes(), torch.no_grad():
            is_given = bool(before) or grad_tensors is not None
            factor = 1.0 if is_given else autograd.factor_of(tensors)
            if BY_HAND <= factor < math.inf:
                run.by_hand = factor
                run.scaling.append(range(mode.num_ops - 2, mode.num_ops))
                if scale is not None:
                    run.scale = scale
                    grad_tensors = torch.full_like(tensors, scale / factor)
        original(tensors, grad_tensors, *args, **kwargs)

    patches.wrap(torch.autograd, "backward", _here(backward))
    patches.wrap(GradScaler, "scale", _here(multiply))
    patches.wrap(GradScaler, "step", _here(step))
    patches.wrap(TorchGradScaler, "scale", _here(multiply))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about skipped steps
            yield
    finally:
        for scaler, attributes in before.values():
            vars(scaler).clear()
            vars(scaler).update(attributes)
