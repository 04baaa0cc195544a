"""Mixed precision for an unmodified training script that has none (``halfstep run --amp``).

``amp_forward`` runs the model under autocast and prints messages, ``amp_backward`` scales losses
and unscales gradients. This module routes optimizer steps through the scaler and holds back
learning-rate schedules after skipped steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep._autocast import Policy
from halfstep._autocast.access import fitting_numbers
from halfstep._gradients.gradients import collect, parameters
from halfstep._gradients.optimizers import (
    evaluates_first,
    handles_scale,
    name,
    split_closure,
    with_closure,
)
from halfstep._gradients.scalars import CPU, combine
from halfstep._pytorch import compiler, optim
from halfstep._scaler import DueSchedules, GradScaler, GuardScaler, access
from halfstep._tools.patches import Patches, subclasses, watch_steps
from halfstep._tools.record.run import OWN_PRECISION
from halfstep._tools.run.amp_backward import Backward, FreshGradients
from halfstep._tools.run.amp_forward import Forward, ScriptState
from halfstep.events import is_stepping, observe_contexts

StepFunction = Callable[..., Any]


@contextmanager
def mixed_precision(
    dtype: torch.dtype,
    say: Callable[[str], None],
    *,
    policy: Policy | str | None = None,
    products: Callable[[], Mapping[str, int]] = dict,
    is_explained: Callable[[], bool] = bool,
) -> Iterator[GradScaler | None]:
    """Run training loops inside the block in mixed precision, as docs/run.md describes.

    All patches are undone when the block ends. Cost: 0.1 to 0.2 microseconds per module call. With
    float16, also about 1 microsecond per node of the autograd graph, and one read and write of the
    gradients per backward pass (two if the pass adds to existing gradients).

    Limits: a module runs unchanged while it is exported, and also inside a compiled function unless
    the module itself is compiled. Optimizers and schedules made before the block are found, except
    an optimizer that already had a schedule.

    ``say`` receives each message as one line: a summary after the first iteration, or the reason
    why the script runs unchanged. Module rules of the policy apply to the first model. ``products``
    returns how many products a record has seen by dtype, and ``is_explained`` whether an error or
    other processes say why no module ran. The context is the scaler; None for bfloat16.
    """
    script = ScriptState(dtype, say, products, is_explained)
    scaler = GradScaler() if script.is_scaling else None
    try:
        with Patches() as patches:
            forward = Forward(dtype, policy, script)
            forward.install(patches)
            _switch_off_for_scalers(patches, scaler, script)
            if scaler is not None:
                fresh, schedules = FreshGradients(), Schedules(script)
                backward = Backward(scaler, fresh, script)
                steps = ScaledSteps(scaler, backward, fresh, schedules, script)
                for part in (backward, steps, schedules):
                    part.install(patches)
            try:
                with (
                    observe_contexts(forward.note_region),
                    _noting_steps(script),
                    fitting_numbers(),
                ):
                    yield scaler
            except SystemExit:  # the normal end of many scripts
                _end(scaler, script)
                raise
            _end(scaler, script)
    finally:
        script.is_on = False


def _end(scaler: GradScaler | None, script: ScriptState) -> None:
    if scaler is not None:
        access.end_iteration(scaler)
    script.end()


def _noting_steps(script: ScriptState) -> AbstractContextManager[object]:
    """Note the steps of a script whose loss is not scaled; scaled steps note themselves."""
    if script.is_scaling:
        return nullcontext()
    return register_optimizer_step_pre_hook(lambda optimizer, *_: script.note_step(optimizer))


def _switch_off_for_scalers(patches: Patches, ours: GradScaler | None, script: ScriptState) -> None:

    def look(scaler: Any) -> None:
        if not script.is_training or scaler is ours:
            return
        if not isinstance(scaler, GuardScaler):
            script.switch_off(f"{OWN_PRECISION} GradScaler")
        elif script.is_scaling:  # the guard and our scaler would both skip steps
            script.switch_off("the script has a guard, which checks unscaled gradients")

    watch_scalers(patches, look)


def watch_scalers(patches: Patches, look: Callable[[Any], None]) -> None:
    """Call ``look`` with each enabled scaler that is made, and with those that scale a loss."""

    def init(original: Callable[..., None], scaler: Any, /, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            look(scaler)

    def scale(original: Callable[..., Any], scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The scaler may have been made before the block.
        if not torch.compiler.is_compiling() and scaler.is_enabled():
            look(scaler)
        return original(scaler, *args, **kwargs)

    for cls in (GradScaler, TorchGradScaler):
        patches.wrap(cls, "__init__", init)
        patches.wrap(cls, "scale", scale)


# --- steps ----------------------------------------------------------------------------------------


@dataclass
class ScaledSteps:
    """Wrapper of ``step`` of every optimizer class."""

    _scaler: GradScaler
    _backward: Backward
    _fresh: FreshGradients
    _schedules: Schedules
    _script: ScriptState

    def install(self, patches: Patches) -> None:
        watch_steps(patches, self._step, self._meet)
        patches.wrap(Optimizer, "zero_grad", self._zero_grad)

    def _meet(self, optimizer: Optimizer) -> None:
        self._fresh.meet(optimizer)
        self._script.is_by_hand = False

    def _zero_grad(
        self, original: Callable[..., None], optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        if self._script.is_training:
            self._fresh.forget(optimizer)

    @compiler.keep_out_of_graphs
    def _step(
        self, original: StepFunction, optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> Any:
        if is_stepping() or not self._script.is_training:
            return original(optimizer, *args, **kwargs)
        self._meet(optimizer)
        closure, rest, others = split_closure(args, kwargs)
        if closure is None:
            outer, self._backward.stepping = self._backward.stepping, optimizer
            try:
                return self._take(original, optimizer, args, kwargs)
            finally:
                self._backward.stepping = outer
        if evaluates_first(optimizer):
            # The optimizer would do the same. Gradients accumulated before are kept.
            with torch.enable_grad():
                loss = closure()
            others = {key: value for key, value in others.items() if key != "closure"}
            self._take(original, optimizer, rest, others)
            return loss
        if self._fresh.has(optimizer):  # the scaler's own step would drop these
            self._script.switch_off(
                f"{name(optimizer)}.step(closure) uses gradients from before its closure, as SAM "
                "does, which a GradScaler cannot skip (--amp bf16 needs none)"
            )
            return self._take_unscaled(original, optimizer, args, kwargs)
        return self._take_with(closure, optimizer, rest, others)

    def _take(self, original: StepFunction, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Step through the scaler, which skips the step if a gradient is inf or NaN."""
        running = self._backward.running
        if running is not None:  # the optimizer steps in a hook of the backward pass
            running.unscale_(parameters(optimizer))
        found = self._fresh.take(optimizer)
        if found is None:
            return self._take_unscaled(original, optimizer, args, kwargs)
        self._script.note_step(optimizer)
        if access.is_unscaled(self._scaler, optimizer):
            self._scaler.update()
        entry = access.add_check(self._scaler, optimizer, *found)
        try:
            result = self._scaler.step(optimizer, *args, **kwargs)
        except BaseException:  # it ended halfway, which is no step that the script left out
            access.drop_iteration(self._scaler)
            raise
        entry.release()  # the script owns their memory
        self._finish(optimizer)
        return result

    def _take_unscaled(
        self, original: StepFunction, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> Any:
        """Step if no gradient comes from a scaled pass; skip if a gradient is inf or NaN.

        Sync: one if there are gradients.
        """
        gradients = collect(parameters(optimizer))
        if gradients.grads:
            self._script.note_unscaled(optimizer)
            if combine(gradients.check().values(), CPU):
                self._schedules.note(optimizer, False)
                return None
        return original(optimizer, *args, **kwargs)

    def _take_with(
        self, closure: StepFunction, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> Any:
        """Step with a closure that may be evaluated many times."""
        self._script.note_step(optimizer)
        access.end_iteration(self._scaler)
        loss = None

        def evaluate() -> Any:
            nonlocal loss
            loss = closure()
            found = self._fresh.take(optimizer)
            if found is not None:
                access.add_check(self._scaler, optimizer, *found)
            return loss

        args, kwargs = with_closure(evaluate, args, kwargs)
        result = self._scaler.step(optimizer, *args, **kwargs)
        self._finish(optimizer)
        # The script may use the loss even if the step was skipped.
        return loss if result is None else result

    def _finish(self, optimizer: Optimizer) -> None:
        """Report the outcome to the schedules; end the iteration after the last optimizer."""
        outcome = self._scaler.outcome(optimizer)
        # Reading a step that was decided on the device would wait for it.
        self._schedules.note(optimizer, outcome if handles_scale(optimizer) else outcome.taken)
        if self._backward.running is None and not self._fresh.is_waiting():
            self._scaler.update()


# --- schedules ------------------------------------------------------------------------------------

# A schedule moves only if its optimizer took a step since the schedule's last move. A schedule that
# is stepped once per iteration is thus held back after a skipped step. A schedule that is stepped
# once per epoch moves even if the last step of the epoch was skipped.


class Schedules:
    """Wrapper of ``step`` of every scheduler class."""

    def __init__(self, script: ScriptState) -> None:
        self._script = script
        self._due = DueSchedules()
        self.note = self._due.note

    def install(self, patches: Patches) -> None:
        watched: set[type] = set()

        def watch(cls: type) -> None:
            if cls not in watched and "step" in vars(cls):
                watched.add(cls)
                patches.wrap(cls, "step", self._step)

        def init_subclass(cls: type[LRScheduler], /, **kwargs: Any) -> None:
            super(LRScheduler, cls).__init_subclass__(**kwargs)
            watch(cls)

        for cls in (LRScheduler, *subclasses(LRScheduler)):
            watch(cls)
        patches.put(LRScheduler, "__init_subclass__", classmethod(init_subclass))

    def _step(
        self, original: Callable[..., Any], scheduler: LRScheduler, /, *args: Any, **kwargs: Any
    ) -> Any:
        if self._script.is_training and optim.is_being_made(scheduler):
            self._due.note_move(scheduler)
        elif self._script.is_training:
            self._script.schedules.setdefault(type(scheduler).__name__)
            if not self._due.try_move(scheduler):
                return None
        return original(scheduler, *args, **kwargs)
