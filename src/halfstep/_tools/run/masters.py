"""Master weights and guards for an unmodified script (``halfstep run --masters --guard``)."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep._common.formats import dtype_name
from halfstep._common.numbers import things
from halfstep._gradients.buffers import Buffers
from halfstep._gradients.gradients import collect, parameters
from halfstep._gradients.optimizers import is_bypassed, members, name
from halfstep._gradients.scalars import CPU, combine
from halfstep._master_weights.master_weights import (
    LOWER,
    StoreName,
    master_weights,
    with_masters,
)
from halfstep._pytorch import compiler, optim
from halfstep._pytorch.distributed import has_process_group, reduced_by, world
from halfstep._pytorch.listeners import listening_to_backward
from halfstep._scaler import GradScaler, Guard, GuardScaler, access, guard
from halfstep._tools.patches import Patches, TopLevelCalls, not_compiled, watch_steps
from halfstep._tools.replay.replay import is_replaying
from halfstep._tools.run.amp import watch_scalers
from halfstep.errors import CallOrderError
from halfstep.events import is_stepping

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Additions:
    """What every optimizer of a script gets: master weights, a guard."""

    has_masters: bool = False
    is_guarding: bool = False
    max_norm: float | None = None
    # How several ranks decide about a step: each "alone", by its own gradients; "together", as
    # parts of a whole; None: as the parameters show.
    ranks: Literal["alone", "together"] | None = None


NO_ADDITIONS = Additions()


@contextmanager
def added(additions: Additions, say: Callable[[str], None]) -> Iterator[None]:
    """Give each optimizer in the block master weights and a guard, as docs/run.md describes.

    An optimizer gets them at the first of these moments: a backward pass, which comes after casts
    of the model and the wrappers of frameworks; its step, whose closure may have that pass;
    ``load_state_dict``, which needs the master weights; and the forward pass of a
    DistributedDataParallel, which needs to know the dtype of the gradients. They stay when the
    block ends. ``say`` receives each message as one line.
    """
    adding = _Adding(additions, say)
    with Patches() as patches, listening_to_backward(adding.before_backward):
        adding.install(patches)
        yield


class _Watching(TopLevelCalls):
    """The buffers of all modules that are trained, for the scalers and guards of a script."""

    is_on = True

    def __init__(self) -> None:
        super().__init__()
        self.buffers = Buffers()

    def install(self, patches: Patches) -> None:
        super().install(patches)
        patches.wrap(torch.jit, "script", self._script)

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        if is_trained and not (is_replaying() or isinstance(module, torch.jit.ScriptModule)):
            self.buffers.watch(module)
        with self.inside():
            return original(module, *args, **kwargs)

    def _script(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.buffers.unwatch()  # it cannot compile their hooks
        return original(*args, **kwargs)


class _Adding:
    def __init__(self, additions: Additions, say: Callable[[str], None]) -> None:
        self._additions, self._say = additions, functools.cache(say)  # each message once
        # Ordered: an outer optimizer, such as SAM, comes before the one that it makes.
        self._without_masters = weakref.WeakKeyDictionary[Optimizer, None]()
        self._without_guard = weakref.WeakKeyDictionary[Optimizer, None]()
        # Weak values: the step of an optimizer refers to it.
        self._steps = weakref.WeakKeyDictionary[Optimizer, tuple[weakref.ref[Any], bool]]()
        self._guards = weakref.WeakKeyDictionary[Optimizer, Guard]()
        self._has_scaler = False
        self._watching = _Watching()

    def install(self, patches: Patches) -> None:
        watch_steps(patches, self._step, self._meet, is_transparent=True)
        patches.wrap(Optimizer, "__setstate__", self._copy)
        patches.wrap(Optimizer, "load_state_dict", self._load)
        patches.wrap(DistributedDataParallel, "forward", self._forward)
        watch_scalers(patches, self._note_scaler)
        if self._additions.is_guarding:
            self._watching.install(patches)

    def _meet(self, optimizer: Optimizer) -> None:
        if self._additions.has_masters:
            self._without_masters[optimizer] = None
        if self._additions.is_guarding and not self._has_scaler:
            self._without_guard[optimizer] = None

    # --- the moments ------------------------------------------------------------------------------

    def before_backward(self, *_: object, is_early: bool = False) -> None:
        if not is_replaying():
            for optimizer in [*self._without_masters, *self._without_guard]:
                self._add(optimizer, is_early=is_early)

    def _forward(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.before_backward(is_early=True)
        return original(*args, **kwargs)

    @compiler.keep_out_of_graphs
    def _step(
        self, original: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_replaying():
            if self._is_past_scaler_and_bad(optimizer):
                return None
            self._add(optimizer)
            replacement = self._replacement(optimizer)
            # The script calls the step that it has kept from before, or calls one for the first
            # time. Not optimizer.step, by which accelerate may have replaced ours.
            if replacement is not None and is_bypassed(optimizer):
                return replacement(*args, **kwargs)
            if optimizer in self._without_masters:
                self._say(f"--masters: {name(optimizer)} has no bfloat16 or float16 parameters")
        return original(optimizer, *args, **kwargs)

    def _load(
        self, original: Callable[..., Any], optimizer: Optimizer, state_dict: Any, *args: Any
    ) -> None:
        # accelerate loads the empty state of each optimizer that it wraps.
        is_added = state_dict.get("state") and self._add_masters(optimizer, is_early=True)
        load = optimizer.load_state_dict if is_added else original.__get__(optimizer)
        load(state_dict, *args)

    def _copy(self, original: Callable[..., Any], optimizer: Optimizer, state: Any) -> None:
        original(optimizer, state)
        if "step" not in vars(optimizer):  # a copy; PyTorch also loads a state with this method
            self._meet(optimizer)

    # --- what is added ----------------------------------------------------------------------------

    def _add(self, optimizer: Optimizer, *, is_early: bool = False) -> None:
        """Add what is missing and possible. It ``is_early`` before a forward pass."""
        self._add_masters(optimizer, is_early=is_early)
        self._add_guard(optimizer)

    def _add_masters(self, optimizer: Optimizer, *, is_early: bool) -> bool:
        if optimizer not in self._without_masters:
            return False
        params = [param for param in parameters(optimizer) if param.dtype in LOWER]
        if not params:  # until now
            return False
        del self._without_masters[optimizer]
        # Those behind a wrapper or in a container get their own.
        is_outer = len(members(optimizer)) > 1 or not optim.is_whole(optimizer)
        if is_outer or with_masters(optimizer):
            return False
        num = Counter(param.dtype for param in params)
        store: StoreName = "float32" if torch.float16 in num else "split"
        is_late = store == "float32" and not is_early
        try:
            if is_late and has_process_group() and any(reduced_by(params)):
                raise ValueError("the forward pass of its DistributedDataParallel is over")
            master_weights(optimizer, store)
        except (TypeError, ValueError) as error:
            self._say(f"--masters: {name(optimizer)} steps without masters: {error}")
            return False
        what = " and ".join(things(num[each], f"{dtype_name(each)} parameter") for each in num)
        self._say(f"--masters: {name(optimizer)} steps {what} in float32 (store: {store})")
        if optimizer not in self._guards:  # whose step is the outer one
            self._note_step(optimizer)
        return True

    def _add_guard(self, optimizer: Optimizer) -> None:
        if optimizer not in self._without_guard:
            return
        del self._without_guard[optimizer]
        if _holds_others(optimizer):
            return
        norm = self._additions.max_norm
        try:
            trained = (param for param in parameters(optimizer) if param.requires_grad)
            if any(p.dtype is p.grad_dtype is torch.float16 for p in trained):  # raises in step 1
                raise ValueError("it has gradients in float16; --masters makes them float32")
            ranks = self._additions.ranks
            group: ProcessGroup | Literal["local"] | None = "local" if ranks == "alone" else None
            if ranks == "together" and has_process_group():
                group = world()
            self._guards[optimizer] = guard(optimizer, norm, process_group=group)
        except (CallOrderError, TypeError, ValueError) as error:
            self._say(f"--guard: {name(optimizer)} steps without a guard: {error}")
            return
        clips = "" if norm is None else f", and clips the norm of the others to {norm:g}"
        self._say(f"--guard: {name(optimizer)} skips steps with inf or NaN gradients{clips}")
        self._note_step(optimizer)

    def _note_step(self, optimizer: Optimizer) -> None:
        step: Any = optimizer.step  # a function if a schedule has wrapped the step of a guard
        is_method = hasattr(step, "__func__")
        self._steps[optimizer] = weakref.ref(step.__func__ if is_method else step), is_method

    def _replacement(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the step with what was added; None if nothing was, or nothing refers to it."""
        found, is_method = self._steps.get(optimizer, (None, False))
        step: Callable[..., Any] | None = None if found is None else found()
        return functools.partial(step, optimizer) if is_method and step is not None else step

    def _note_scaler(self, scaler: Any) -> None:
        """Leave the steps to a scaler of the script, which is an error in a step with a guard."""
        if not self._additions.is_guarding or is_replaying():
            return
        is_ours = isinstance(scaler, GradScaler)
        if is_ours:
            access.restore_with(scaler, self._watching.buffers)
        if isinstance(scaler, GuardScaler):
            return
        self._has_scaler = True
        self._without_guard.clear()
        for each in self._guards.values():
            each.remove()
        self._guards.clear()
        if not is_ours:
            self._say("--guard: the script's GradScaler is PyTorch's own; nothing is guarded")
            return
        norm = "" if self._additions.max_norm is None else "; no norm is clipped"
        self._say(
            "--guard: the script's GradScaler skips steps with inf or NaN gradients and restores "
            "buffers; it halves the scale, and tries the old one again where that may not be the "
            f"cause{norm}"
        )

    def _is_past_scaler_and_bad(self, optimizer: Optimizer) -> bool:
        """Return whether a step past the script's scaler would use inf or NaN. Sync: one."""
        if not self._has_scaler or is_stepping() or has_process_group():
            return False
        gradients = collect(parameters(optimizer))
        return bool(gradients.grads and combine(gradients.check().values(), CPU))


def _holds_others(optimizer: Optimizer) -> bool:
    """Return whether an optimizer steps others; as SAM, it may then evaluate a closure late."""
    held = (each for each in vars(optimizer).values() if each is not optimizer)
    return len(members(optimizer)) > 1 or any(isinstance(each, Optimizer) for each in held)
