"""Master weights and guards for an unmodified script (``halfstep run --masters --guard``)."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep._common.numbers import percent, things
from halfstep._common.patches import Patches, watch_steps
from halfstep._diagnose.replay import is_replaying
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import members, name
from halfstep._master_weights.lost_updates import OpenSteps, is_below_rounding
from halfstep._master_weights.master_weights import (
    LOWER,
    StoreName,
    has_master_weights,
    master_weights,
)
from halfstep._numerics.formats import dtype_name
from halfstep._numerics.measure import counted_part
from halfstep._pytorch import compiler, optim
from halfstep._pytorch.distributed import has_process_group, local_part, reduced_by
from halfstep._pytorch.listeners import listening_to_backward
from halfstep._pytorch.modes import unseen_by_modes
from halfstep._run.amp import watch_scalers
from halfstep._scaler import Guard, GuardScaler, guard
from halfstep.errors import CallOrderError


@dataclass(frozen=True)
class Additions:
    """What every optimizer of a script gets.

    Attributes:
        store: The store of the master weights; ``"auto"`` is ``"float32"`` for an optimizer with
            float16 parameters, and else ``"split"``. None for no master weights.
        is_guarding: Whether it gets a guard.
        max_norm: What the guard clips the norm of the gradients to; None for no clipping.
    """

    store: StoreName | Literal["auto"] | None = None
    is_guarding: bool = False
    max_norm: float | None = None


@contextmanager
def added(additions: Additions, say: Callable[[str], None]) -> Iterator[None]:
    """Give each optimizer in the block master weights and a guard, as docs/run.md describes.

    An optimizer gets them at the first of these moments: a backward pass, which comes after casts
    of the model and the wrappers of frameworks; its step, whose closure may have that pass;
    ``load_state_dict``, which needs the master weights; and the forward pass of a
    DistributedDataParallel, which needs to know the dtype of the gradients. They stay when the
    block ends.

    Args:
        additions: What each optimizer gets.
        say: Receives each message as one line.
    """
    patches, adding = Patches(), _Adding(additions, say)
    lost = _WouldBeLost()
    try:
        adding.install(patches)
        with listening_to_backward(adding.before_backward), lost.counting():
            yield
    finally:
        patches.undo()
    if additions.store is not None and (text := lost.text()):
        say(f"--masters: {text}")


@dataclass
class _Adding:
    _additions: Additions
    _print: Callable[[str], None]
    # Ordered: an outer optimizer, such as SAM, comes before the one that it makes.
    _without_masters: weakref.WeakKeyDictionary[Optimizer, None] = field(
        default_factory=weakref.WeakKeyDictionary, init=False
    )
    _without_guard: weakref.WeakKeyDictionary[Optimizer, None] = field(
        default_factory=weakref.WeakKeyDictionary, init=False
    )
    _guards: weakref.WeakKeyDictionary[Optimizer, Guard] = field(
        default_factory=weakref.WeakKeyDictionary, init=False
    )
    _has_scaler: bool = field(default=False, init=False)
    _said: set[str] = field(default_factory=set, init=False)

    def install(self, patches: Patches) -> None:
        watch_steps(patches, self._step, self._meet, is_transparent=True)
        patches.wrap(Optimizer, "__setstate__", self._copy)
        patches.wrap(Optimizer, "load_state_dict", self._load)
        patches.wrap(DistributedDataParallel, "forward", self._forward)
        watch_scalers(patches, self._note_scaler)

    def _meet(self, optimizer: Optimizer) -> None:
        if self._additions.store is not None:
            self._without_masters[optimizer] = None
        if self._additions.is_guarding and not self._has_scaler:
            self._without_guard[optimizer] = None

    # --- the moments ------------------------------------------------------------------------------

    def before_backward(self, _: object, *, is_early: bool = False) -> None:
        if not is_replaying():
            for optimizer in [*self._without_masters, *self._without_guard]:
                self._add(optimizer, is_early=is_early)

    def _forward(
        self,
        original: Callable[..., Any],
        module: DistributedDataParallel,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not torch.compiler.is_compiling():
            self.before_backward(module, is_early=True)
        return original(module, *args, **kwargs)

    @compiler.keep_out_of_graphs
    def _step(
        self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_replaying():
            if self._add(optimizer):
                return optimizer.step(*args, **kwargs)
            if optimizer in self._without_masters:
                self._say(f"--masters: {name(optimizer)} has no bfloat16 or float16 parameters")
        return original(optimizer, *args, **kwargs)

    def _load(
        self,
        original: Callable[..., Any],
        optimizer: Optimizer,
        state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # accelerate loads the empty state of each optimizer that it wraps.
        if state_dict.get("state") and self._add_masters(optimizer, is_early=True):
            return optimizer.load_state_dict(state_dict, *args, **kwargs)
        return original(optimizer, state_dict, *args, **kwargs)

    def _copy(self, original: Callable[..., Any], optimizer: Optimizer, state: Any) -> None:
        original(optimizer, state)
        if "step" not in vars(optimizer):  # a copy; PyTorch also loads a state with this method
            self._meet(optimizer)

    # --- what is added ----------------------------------------------------------------------------

    def _add(self, optimizer: Optimizer, *, is_early: bool = False) -> bool:
        """Add what is missing and possible; return whether this has replaced ``step``.

        It ``is_early`` before a forward pass.
        """
        has_masters = self._add_masters(optimizer, is_early=is_early)
        return self._add_guard(optimizer) or has_masters

    def _add_masters(self, optimizer: Optimizer, *, is_early: bool) -> bool:
        if optimizer not in self._without_masters:
            return False
        dtypes = Counter(p.dtype for p in parameters(optimizer) if p.dtype in LOWER)
        if not dtypes:  # until now
            return False
        del self._without_masters[optimizer]
        # Those behind a wrapper or in a container get their own.
        is_outer = len(members(optimizer)) > 1 or not optim.is_whole(optimizer)
        if is_outer or has_master_weights(optimizer):
            return False
        store = self._additions.store
        assert store is not None
        if store == "auto":
            store = "float32" if torch.float16 in dtypes else "split"
        try:
            if torch.float16 in dtypes and not is_early:
                _refuse_buckets(parameters(optimizer))
            master_weights(optimizer, store)
        except (TypeError, ValueError) as error:
            self._say(f"--masters: {name(optimizer)} steps without masters: {error}")
            return False
        params = " and ".join(
            things(num, f"{dtype_name(dtype)} parameter") for dtype, num in dtypes.items()
        )
        self._say(f"--masters: {name(optimizer)} steps {params} in float32 (store: {store})")
        return True

    def _add_guard(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._without_guard:
            return False
        del self._without_guard[optimizer]
        if _holds_others(optimizer):
            return False
        try:
            _refuse_float16(parameters(optimizer))
            self._guards[optimizer] = guard(optimizer, self._additions.max_norm)
        except (CallOrderError, TypeError, ValueError) as error:
            self._say(f"--guard: {name(optimizer)} steps without a guard: {error}")
            return False
        norm = self._additions.max_norm
        clips = "" if norm is None else f", and clips the norm of the others to {norm:g}"
        self._say(f"--guard: {name(optimizer)} leaves out steps with inf or NaN gradients{clips}")
        return True

    def _note_scaler(self, scaler: Any) -> None:
        """Leave the steps to a scaler of the script, which is an error in a step with a guard."""
        if not self._additions.is_guarding or isinstance(scaler, GuardScaler) or is_replaying():
            return
        self._has_scaler = True
        self._without_guard.clear()
        for each in self._guards.values():
            each.remove()
        self._guards.clear()
        self._say(
            "--guard: the script has its own GradScaler, which skips such steps; nothing is guarded"
        )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._print(text)


def _refuse_float16(params: list[Tensor]) -> None:
    """Raise the error that a guard would raise in the first step."""
    trained = (param for param in params if param.requires_grad)
    if any(param.dtype is param.grad_dtype is torch.float16 for param in trained):
        raise ValueError("it has gradients in float16; --masters makes them float32")


def _refuse_buckets(params: list[Tensor]) -> None:
    """Raise an error if gradients have buckets in which an iteration has begun.

    Gradients of float16 parameters become float32; ranks would no longer average them.
    """
    if has_process_group() and any(reduced_by(params)):
        raise ValueError(
            "it was made between the forward pass of its DistributedDataParallel, or the compiled "
            "one, and the backward pass, when its float16 gradients cannot become float32"
        )


def _holds_others(optimizer: Optimizer) -> bool:
    """Return whether an optimizer steps others; as SAM, it may then evaluate a closure late."""
    held = (each for each in vars(optimizer).values() if each is not optimizer)
    return len(members(optimizer)) > 1 or any(isinstance(each, Optimizer) for each in held)


# --- updates that would have been lost ------------------------------------------------------------


class _WouldBeLost:
    """The share of the updates of 16-bit parameters that master weights have kept.

    Steps 1, 2, 4, 8, ... of each optimizer count, and of large tensors equally spaced rows. Sync:
    none before :meth:`text`.
    """

    def __init__(self) -> None:
        self._failure: Exception | None = None
        self._num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._steps = OpenSteps(_part, is_below_rounding)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._num_counted = 0
        self._total: dict[torch.device, Tensor] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
            yield

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or is_replaying() or not has_master_weights(optimizer):
            return
        if self._process != os.getpid():  # a fork
            self._begin()
        number = self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1
        if number.bit_count() == 1:
            with self._keeping_failures():
                self._steps.begin(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        with self._keeping_failures():
            counted = [each for each in self._steps.end(optimizer) if each.param.dtype in LOWER]
            self._num_counted += bool(counted)
            for each in counted:
                values, device = local_part(each.param), each.counts.device
                in_full = each.counts.float() * (values.numel() / max(_part(values).numel(), 1))
                self._total[device] = self._total.get(device, 0) + in_full

    @contextmanager
    def _keeping_failures(self) -> Iterator[None]:
        try:
            with unseen_by_modes():
                yield
        except Exception as error:  # counting must not end a run, whatever the optimizer is
            self._failure = error

    def text(self) -> str:
        """Return a sentence; empty if nothing was counted in this process."""
        if self._process != os.getpid():
            return ""
        if self._failure is not None:
            return f"the updates could not be counted: {self._failure}"
        updates, lost = sum((each.cpu() for each in self._total.values()), torch.zeros(2)).tolist()
        if not updates:
            return ""
        return (
            f"{percent(lost / updates)} of the updates in "
            f"{things(self._num_counted, 'sampled step')} were too small for 16-bit weights, and "
            "would have been lost without masters"
        )


def _part(values: Tensor) -> Tensor:
    """Return the inspected entries of a weight or gradient."""
    return counted_part(values, 1 << 16)
