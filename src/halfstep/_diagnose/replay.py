"""A step run once more, with everything as it was, and put back afterwards."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep import _torch
from halfstep._autocast.casts import tensors_in
from halfstep._autocast.kernels import observed_by
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._autocast.rule import Rule
from halfstep._common.force_eager import eager
from halfstep._common.patches import Around, Patches, subclasses, watch_steps
from halfstep._diagnose import across_ranks
from halfstep._diagnose.owners import owners_in
from halfstep._diagnose.precision import AS_IT_IS, Entered, Precision, autocast_as
from halfstep._diagnose.undo import Undo
from halfstep._diagnose.watcher import FoundModules, Watcher, Witness
from halfstep._scaler import GradScaler
from halfstep._scaler.closures import split_closure
from halfstep._scaler.engine import Engine
from halfstep._scaler.gradients import parameters
from halfstep._scaler.observers import OBSERVERS
from halfstep._scaler.ranks.finding import Ranks


@dataclass(frozen=True)
class Setting:
    """How a replay differs from the step.

    Attributes:
        precision: What autocast is to do.
        scale: The scale of all losses; None for that of the step.
    """

    precision: Precision = AS_IT_IS
    scale: float | None = None


@dataclass
class Ends:
    """What is known of a step when it has run.

    Attributes:
        scale: The scale that losses were multiplied by, None if none was.
        entered: What the step asked of autocast.
        error: What the step raised.
        scaling: The numbers of the ops that multiplied losses by the scale.
    """

    scale: float | None = None
    entered: list[Entered] = field(default_factory=list)
    error: Exception | None = None
    scaling: list[range] = field(default_factory=list)


_Looks = TypeVar("_Looks", bound=Witness)


class Replayer:
    """Runs a step again and again.

    Nothing of the training is different afterwards: parameters, buffers, gradients, random
    generators, scalers and whatever else PyTorch or the modules hold. Optimizers and schedules do
    not step; their closures are called once.

    Args:
        step: Runs the step.
        model: The model, if it is known.

    Attributes:
        model: That which has the names, from the first replay on.
        num_replays: How often the step was run.
    """

    def __init__(self, step: Callable[[], object], model: nn.Module | None) -> None:
        self._step, self._outermost, self.model = step, model, model
        self._owners = owners_in(step)
        self._watcher: Watcher | None = None
        self.num_replays = 0

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Replay in this block: what it takes to see which rule decides is made once for all."""
        with observed_by(self._observe):
            yield

    def _observe(self, op: str, rule: Rule, policy: PolicyOnDevice) -> AbstractContextManager[None]:
        return nullcontext() if self._watcher is None else self._watcher.observe(op, rule, policy)

    @contextmanager
    def run(
        self,
        setting: Setting,
        witness: Callable[[Undo], _Looks],
        around: AbstractContextManager[object] | None = None,
    ) -> Iterator[tuple[Ends, _Looks]]:
        """Run the step; in the block its end can be looked at, and then all is put back.

        Args:
            setting: How it is to be run.
            witness: Makes what looks at the ops.
            around: A context for the step.

        Yields:
            What is known of the step, and what has looked at its ops.
        """
        self.num_replays += 1
        undo, patches, ends = Undo(), Patches(), Ends()
        with ExitStack() as outer:
            outer.callback(undo.restore)
            for owner in self._owners:
                if isinstance(owner, Optimizer):
                    undo.note_optimizer(owner)
                else:
                    undo.note_model(owner)
            outer.enter_context(replaying())
            modules = FoundModules(self._outermost, undo)
            looks = witness(undo)
            watcher = self._watcher = Watcher(modules, undo, looks, is_alone=True)
            with ExitStack() as stack:
                stack.callback(patches.undo)
                watch_backward(patches, looks, undo)
                _hold_optimizers(patches, looks, undo)
                stack.enter_context(_scaled(patches, watcher, ends, setting.scale))
                stack.enter_context(eager(has_global_hooks=True))
                precision = autocast_as(setting.precision, self.model, patches)
                ends.entered = stack.enter_context(precision)
                stack.enter_context(watcher.watching())
                try:
                    with around or nullcontext():
                        result = self._step()
                    with _torch.unseen_by_modes():
                        for tensor in tensors_in([result]):
                            looks.see_result(tensor.detach())
                except Exception as error:  # the step's own; the caller decides
                    ends.error = error
            self._outermost, self.model = modules.outermost, modules.model
            self._watcher = None
            yield ends, looks


class _Thread(threading.local):
    is_replaying = False


_thread = _Thread()


def is_replaying() -> bool:
    """Return whether what runs now in this thread is a replay, and not the training."""
    return _thread.is_replaying


@contextmanager
def replaying() -> Iterator[None]:
    """Let nobody take for the training what happens meanwhile: no recorder, no runner."""
    listeners, before = OBSERVERS[:], _thread.is_replaying
    OBSERVERS.clear()
    _thread.is_replaying = True
    try:
        yield
    finally:
        _thread.is_replaying = before
        OBSERVERS[:] = listeners


def _here(around: Around) -> Around:
    """Let other threads call the original."""
    thread = threading.get_ident()

    def only_here(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    return only_here


def watch_backward(patches: Patches, looks: Witness, undo: Undo) -> None:
    """Show the losses that backward passes begin with, and the gradients they end with."""

    def backward(original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        leaves = _torch.leaves_of(list(tensors_in([tensors])))
        undo.note_grads(leaves)
        _see_losses(looks, [tensors])
        original(tensors, *args, **kwargs)
        _see_gradients(looks, ((leaf, leaf.grad) for leaf in leaves))

    def grad(original: Callable[..., Any], outputs: Any, inputs: Any, *a: Any, **kw: Any) -> Any:
        _see_losses(looks, [outputs])
        gradients = original(outputs, inputs, *a, **kw)
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        _see_gradients(looks, zip(given, gradients, strict=True))
        return gradients

    patches.wrap(torch.autograd, "backward", _here(backward))
    patches.wrap(torch.autograd, "grad", _here(grad))


def _see_losses(looks: Witness, values: Sequence[Any]) -> None:
    with _torch.unseen_by_modes():
        for loss in tensors_in(values):
            looks.see_loss(across_ranks.local_part(loss))


def _see_gradients(looks: Witness, pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    with _torch.unseen_by_modes():
        for leaf, gradient in pairs:
            if gradient is not None:
                looks.see_gradient(leaf, across_ranks.local_part(gradient))


def _hold_optimizers(patches: Patches, looks: Witness, undo: Undo) -> None:
    """Let optimizers and schedules do nothing, and keep the gradients that somebody zeroes."""

    def step(original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        closure, *_ = split_closure(args, kwargs)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        _see_gradients(looks, ((param, param.grad) for param in _parameters(optimizer)))
        return loss

    def stay(original: Any, *args: Any, **kwargs: Any) -> None:
        return None

    def zero_grad(original: Callable[..., None], owner: Any, *args: Any, **kwargs: Any) -> None:
        undo.note_grads(_parameters(owner))
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
def _scaled(patches: Patches, watcher: Watcher, ends: Ends, scale: float | None) -> Iterator[None]:
    """Let every scaler begin with a scale, and forget what it does meanwhile."""
    before: dict[int, tuple[Any, dict[str, Any]]] = {}

    def multiply(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if id(scaler) not in before and scaler.is_enabled():
            before[id(scaler)] = (scaler, dict(vars(scaler)))
            with _torch.unseen_by_modes():  # the ops of all replays have the same numbers
                ends.scale = scaler.get_scale() if scale is None else scale
                _begin_anew(scaler, scale)
        _see_losses(watcher.witness, args[:1])
        first = watcher.num_ops
        result = original(scaler, *args, **kwargs)
        ends.scaling.append(range(first, watcher.num_ops))
        return result

    patches.wrap(GradScaler, "scale", _here(multiply))
    patches.wrap(TorchGradScaler, "scale", _here(multiply))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of skipped steps
            yield
    finally:
        for scaler, attributes in before.values():
            vars(scaler).clear()
            vars(scaler).update(attributes)


def _begin_anew(scaler: Any, scale: float | None) -> None:
    """Give a scaler books of its own for a replay."""
    if isinstance(scaler, TorchGradScaler):
        _torch.restart_scaler(scaler, scale)
        return
    scales = scaler._engine.scales
    states = scales.read()
    first = scales.first
    if scale is not None:
        first = replace(first, scale=scale)
        states = {loss: replace(state, scale=scale) for loss, state in states.items()}
    scaler._engine = Engine(first, Ranks("local", None))  # the others do not replay this
    if states:
        scaler._engine.scales.load(states)
