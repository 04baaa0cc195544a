"""The gradient scaler: the interface of ``torch.amp.GradScaler`` and halfstep's extensions to it.

The algorithm is dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", 2018,
arXiv:1710.03740). :mod:`halfstep._scaler.engine` and :mod:`halfstep._scaler.step` implement it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from halfstep._common.numbers import power
from halfstep._common.text import warn
from halfstep._gradients.optimizers import (
    handles_scale,
    name,
    refuse_older_protocol,
    require_optimizer,
    split_closure,
)
from halfstep._gradients.scalars import checked_count, checked_device
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler import clipping, disabled, step, torch_amp
from halfstep._scaler.alarm import Alarm, OnSkips
from halfstep._scaler.engine import Engine
from halfstep._scaler.journal import THIS_THREAD
from halfstep._scaler.outcome import Counts, HistoryEntry, Outcome
from halfstep._scaler.ranks import Ranks
from halfstep._scaler.scale_state import Dynamic, ScaleState, Schedule, schedule_of
from halfstep._scaler.torch_amp import TorchAttributes
from halfstep._scaler.undo import attempts, step_with_closure
from halfstep.errors import CallOrderError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class GradScaler(TorchAttributes):
    """A gradient scaler, which scales the loss so that small gradients survive float16.

    The scale follows the gradients: when one is inf or NaN, the optimizer's step is skipped and the
    scale is multiplied by ``backoff_factor``; after ``growth_interval`` consecutive steps it is
    multiplied by ``growth_factor``. If a step is skipped at ``min_scale`` too, the scale returns to
    where it was and a warning is raised. After skips with a non-finite loss, and after those that
    have brought it below 1, it is restored for a trial, and stays if that step is taken.

    It has every method of ``torch.amp.GradScaler``; docs/coming_from.md lists the intended
    differences.

    Args:
        device: Device type, such as ``"cuda"``. By default, the device of the first loss.
        init_scale: The initial scale, > 0.
        growth_factor: >= 1.
        backoff_factor: In (0, 1]. The scale is constant if both factors are 1.
        growth_interval: Number of consecutive steps after which the scale grows, >= 1.
        enabled: If False, every method works and nothing is scaled or checked: ``step`` only calls
            ``optimizer.step``. To skip inf and NaN without a scale, use :func:`halfstep.guard`.
        schedule: How the scale changes, in place of the three numbers above: ``Dynamic`` or
            ``Static``.
        min_scale: Lower limit of the scale. Default: 2^-24, or ``init_scale`` if that is smaller.
        max_scale: Upper limit for growth. Default: the largest float32 number.
        max_consecutive_skips: Number of consecutive skipped steps that triggers ``on_skips``, >= 1.
        on_skips: ``"warn"``, ``"raise"`` (:class:`halfstep.errors.SkippedStepsError`), or a
            function that takes the report. Also triggered by a skip at ``min_scale``, and the last
            two by a scale that falls below 1; ``"raise"`` warns then.
        module: The trained module: it names the parameters, and a skipped step restores its
            buffers; see :meth:`watch`.
        process_group: The ranks that step together and agree on inf and NaN, norms and the scale;
            a group, a device mesh, or ``"local"`` for this rank alone. By default it is inferred
            from the parameters: DTensors are spread over the ranks of their mesh, and
            DistributedDataParallel makes gradients equal. A copy of the scaler does not keep it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of range, or PyTorch has no such device on this machine.

    Sync: none for the constructor; each method documents its own.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler()
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss = model(torch.ones(2, 4)).square().mean()
        ...     scaler.scale(loss).backward()
        ...     _ = scaler.step(optimizer)
        ...     scaler.update()
        >>> scaler.get_scale()
        65536.0
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        schedule: Schedule | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        max_consecutive_skips: int = 20,
        on_skips: OnSkips = "warn",
        module: torch.nn.Module | None = None,
        process_group: ProcessGroup | DeviceMesh | Literal["local"] | None = None,
    ) -> None:
        self._is_enabled = bool(enabled)
        if not enabled:
            device = None  # GradScaler("cuda", enabled=torch.cuda.is_available()) is usual
        self._device: str | None = None if device is None else checked_device(device)
        numbers = growth_factor, backoff_factor, growth_interval
        schedule = schedule_of(schedule, numbers)
        first = ScaleState.first(init_scale, schedule, min_scale, max_scale)
        self._engine = Engine(first, Ranks(process_group), self)
        self._alarm = Alarm(max_consecutive_skips, on_skips)
        if module is not None:
            self.watch(module)

    # --- the iteration ----------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or all losses in nested containers, by the scale.

        Whether they are finite is also checked, on the device, for the reason of a skipped step:
        after a non-finite loss the scale is restored for a trial.

        Args:
            outputs: A tensor of any shape and floating dtype, or a (nested) list, tuple, named
                tuple, mapping or other iterable of tensors, on one or several devices.

        Returns:
            The scaled outputs in the same structure; iterables other than lists, tuples and
            mappings become lists. A float16 tensor with dimensions is scaled in float32.

        Raises:
            TypeError: ``outputs`` contains something other than tensors.

        Sync: none.
        """
        if not self._is_enabled:
            return outputs
        return self._engine.scale(outputs)

    @keep_out_of_graphs
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place, and check them for inf and NaN.

        Call it before you clip or inspect gradients; otherwise :meth:`step` does it. A gradient
        shared with another optimizer, or with a wrapper of this one, is divided once. Does nothing
        if there are no gradients.

        Raises:
            CallOrderError: Before ``scale``, twice without an ``update`` in between, or after
                ``step``.
            ValueError: The gradients are float16. Nothing is changed.

        Sync: none.
        """
        if not self._is_enabled:
            return
        is_overridden = "_unscale_grads_" in self._overridden()
        if not is_overridden and step.unscale_usual(self._engine, optimizer):
            return
        require_optimizer("unscale_", optimizer)
        if is_overridden:
            torch_amp.unscale_(self, optimizer)
        else:
            step.unscale(self._engine, optimizer)

    @keep_out_of_graphs
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Unscale the gradients if necessary, and step if all of them are finite.

        An optimizer that handles the scale itself (``_step_supports_amp_scaling``, like PyTorch's
        fused optimizers) is always called and skips on the device. After a taken step the gradients
        are unscaled and clipped; a skipped step leaves them unchanged.

        With a closure, which every optimizer takes, the gradients of each evaluation are unscaled
        and checked. It zeroes the gradients, computes the loss, calls
        ``scaler.scale(loss).backward()`` and returns the loss; anything else is an error. An
        evaluation with inf or NaN ends the step, and the parameters are restored.

        A container, which holds several optimizers in ``optimizers`` or ``chained_optimizers``, is
        stepped as one: if any gradient is not finite, none of them steps.

        Args:
            optimizer: The optimizer or container to step.
            *args: Arguments of its ``step``; a closure comes first.
            max_norm: Clip the norm of the unscaled gradients to this value, in the same pass;
                ``math.inf`` only measures it, for :meth:`outcome`.
            **kwargs: Keyword arguments of its ``step``.

        Returns:
            The result of ``optimizer.step``, None for a skipped step. See also :meth:`outcome`.

        Raises:
            CallOrderError: Before ``scale``, twice without an ``update`` in between, without any
                gradient, or with a closure that scales no loss.
            TypeError: ``optimizer.step`` takes the scaler itself (``grad_scaler=``).
            ValueError: The gradients are float16 and the optimizer cannot unscale them itself.

        Sync: one; none for an optimizer that handles the scale itself; with a closure, one for each
        evaluation.
        """
        if not self._is_enabled:
            return disabled.step(self._engine, optimizer, args, kwargs, max_norm)
        overridden = self._overridden()
        before, THIS_THREAD.stepping = THIS_THREAD.stepping, self
        try:
            is_valid = max_norm is None or (type(max_norm) is float and max_norm >= 0.0)
            if is_valid and not (args or kwargs or overridden):
                result = step.take_usual(self._engine, optimizer, max_norm)
                if result is not step.NOT_USUAL:
                    return result
            require_optimizer("step", optimizer)
            if not is_valid:
                max_norm = clipping.checked_max_norm(max_norm)
            if overridden and max_norm is not None:
                torch_amp.refuse(self, f"step(max_norm={max_norm})", torch_amp.CLIP)
            if args or kwargs:
                closure, others, kwargs = split_closure(args, kwargs)
                if closure is not None:
                    torch_amp.refuse(self, "step(closure)", torch_amp.NO_CLOSURE)
                    return step_with_closure(
                        self._engine, optimizer, closure, others, kwargs, max_norm
                    )
            is_fused = handles_scale(optimizer)
            if is_fused and id(optimizer) not in self._engine.journal.plans:
                refuse_older_protocol(optimizer)
            if overridden:
                return torch_amp.step(self, optimizer, args, kwargs, is_fused=is_fused)
            # Looked up on the instance, where accelerate replaces `step` to see if it is called.
            make_step = partial(optimizer.step, *args, **kwargs)
            return step.take(self._engine, optimizer, make_step, max_norm, is_fused=is_fused)
        finally:
            THIS_THREAD.stepping = before

    @keep_out_of_graphs
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: back off, count or grow the scale; or set it by hand.

        Args:
            new_scale: The new scale; the count of consecutive steps is kept. A number is validated
                here. A 1-element tensor is copied without a sync: if it turns out to be zero,
                negative, inf or NaN, the scale stays as it is; and since it may be below 1,
                unscaling checks the gradients twice from then on.

        Raises:
            CallOrderError: No gradients were checked since the last ``update`` (no ``step``), or a
                tensor was passed before the first ``scale``.
            SkippedStepsError: Too many steps were skipped, and ``on_skips`` is "raise". The
                iteration has ended nevertheless.
            TypeError: ``new_scale`` is neither a number nor a real tensor.
            ValueError: ``new_scale`` is a number out of range, does not have exactly one element,
                or requires a gradient.

        Sync: none, unless there is something to report; one with several ranks and an ``on_skips``
        other than "warn".
        """
        if not self._is_enabled:
            return
        if new_scale is not None:
            self._engine.set_scale(new_scale)
            return
        if not self._engine.end_usual():
            self._engine.update()
        if not self._engine.loss_scale.is_quiet:
            self._alarm.sound(self._engine.loss_scale, self._engine.journal)

    @keep_out_of_graphs
    def retry(self, optimizer: torch.optim.Optimizer, times: int = 2) -> Iterator[int]:
        """Run the same batch again at a smaller scale instead of losing it.

        Put the whole iteration, from ``zero_grad`` to ``update``, into the loop; it runs once, and
        again while gradients or loss are inf or NaN, at most ``times`` more. Before each repetition
        the random number generators (PyTorch's, Python's, and NumPy's if loaded) and the buffers of
        watched modules are restored, and the gradients are zeroed.

        Args:
            optimizer: The optimizer whose step decides.
            times: Maximum number of repetitions, >= 0.

        Yields:
            The index of the attempt, 0 for the first.

        Raises:
            CallOrderError: The loop did not call ``step`` and ``update``.

        Memory: one copy of the buffers of watched modules. Sync: two or three for each attempt.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> scaler = GradScaler(init_scale=2.0**127, module=model)
            >>> for attempt in scaler.retry(optimizer, times=5):
            ...     optimizer.zero_grad()
            ...     scaler.scale(model(torch.full((1, 2), 8.0)).sum()).backward()
            ...     _ = scaler.step(optimizer)
            ...     scaler.update()
            >>> attempt, scaler.outcome(optimizer).taken
            (3, True)
        """
        times = checked_count("times", times, at_least=0)
        if not self._is_enabled:
            return iter([0])
        require_optimizer("retry", optimizer)
        return attempts(self._engine, optimizer, times)

    # --- results ----------------------------------------------------------------------------------

    @keep_out_of_graphs
    def outcome(self, optimizer: torch.optim.Optimizer) -> Outcome:
        """Return the outcome of the last step of the optimizer, or of a container that holds it.

        Sync: none; reading the outcome syncs.

        Raises:
            CallOrderError: ``step`` has not been called for this optimizer.
        """
        if not self._is_enabled:
            return disabled.outcome(self._engine, optimizer)
        return self._engine.journal.of(optimizer)

    @keep_out_of_graphs
    def history(self) -> list[HistoryEntry]:
        """Return the last 10,000 steps, oldest first; ``state_dict`` omits them. Sync: one."""
        return self._engine.journal.entries()

    @keep_out_of_graphs
    def counts(self) -> Counts:
        """Return the numbers of taken and skipped iterations. Sync: one."""
        state = self._engine.loss_scale.read()
        in_a_row = state.skipped_in_a_row
        since = state.since if in_a_row else None
        return Counts(state.num_taken, state.num_skipped, in_a_row, since)

    def watch(self, module: torch.nn.Module) -> None:
        """Use the parameter names of this module and restore its buffers; several may be watched.

        If a step is skipped and a buffer of the module has become NaN, all its buffers get the
        values from before the first call of the module in the iteration, whatever their dtype. An
        inf is left: it may belong to a mask. The module is held weakly, and a copy of the scaler
        watches none.

        Memory: one copy of the buffers. Sync: none.

        Raises:
            TypeError: The argument is not a module.
        """
        self._engine.names.watch(module)
        if self._is_enabled:
            self._engine.buffers.watch(module)

    def replicated(self, params: Iterable[Tensor], process_group: ProcessGroup) -> None:
        """Declare that parameters have the same gradients on all ranks of a process group.

        This is for plain parameters whose gradients are averaged by hand: a norm then counts them
        once. It is inferred for DTensors, for DistributedDataParallel, and for plain parameters
        beside DTensors in one optimizer. All ranks still decide together; see ``process_group``.

        Sync: none.
        """
        self._engine.ranks.replicated(params, process_group)
        for plan in self._engine.journal.plans.values():
            plan.params = None

    # --- accessors --------------------------------------------------------------------------------

    @keep_out_of_graphs
    def get_scale(self) -> float:
        """Return the scale; 1.0 if the scaler is disabled. Sync: one."""
        if not self._is_enabled:
            return 1.0
        if "_get_scale_async" in self._overridden():
            scale = self._get_scale_async()
            return self._init_scale if scale is None else scale.item()
        return self._engine.loss_scale.value()

    def get_growth_factor(self) -> float:
        """Return the growth factor. Sync: none."""
        return self._schedule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, >= 1. Sync: none."""
        self._change_schedule(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor. Sync: none."""
        return self._schedule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, in (0, 1]. Sync: none."""
        self._change_schedule(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval. Sync: none."""
        return self._schedule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, >= 1; the next step may then grow the scale.

        Sync: none.
        """
        self._change_schedule(growth_interval=new_interval)

    def is_enabled(self) -> bool:
        """Return whether this object scales anything. Sync: none."""
        return self._is_enabled

    def __repr__(self) -> str:
        """Return a string with scale and schedule. Sync: one."""
        if not self._is_enabled:
            return "GradScaler(enabled=False)"
        return f"GradScaler(scale={power(self.get_scale())}, schedule={self._schedule})"

    # --- saving and loading -----------------------------------------------------------------------

    @keep_out_of_graphs
    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last ``update``; ``{}`` if the scaler is disabled.

        The keys are those of ``torch.amp.GradScaler``, which can load it: ``scale``,
        ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``_growth_tracker``; plus
        ``halfstep``, with a version and the state that PyTorch does not have, as JSON text.

        Sync: one.
        """
        if not self._is_enabled:
            return {}
        now = self._engine.loss_scale.read()
        if self._overridden():
            scale, tracker = self.get_scale(), self._get_growth_tracker()
            ours = now if scale == now.scale else now.with_scale(scale)
            now = replace(ours, growth_tracker=tracker)
        return now.to_dict()

    @keep_out_of_graphs
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class or ``torch.amp.GradScaler`` saved.

        An empty dict, the state of a disabled scaler, changes nothing and warns. Values on the
        device are replaced in place.

        Raises:
            ValueError: A key is missing or a value is invalid. Nothing is changed.

        Sync: none.
        """
        if not self._is_enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict({type(state_dict).__name__}): pass a saved state")
        if not state_dict:
            warn(
                "GradScaler.load_state_dict({}): the checkpoint was saved by a disabled GradScaler "
                "and holds no scale. This one keeps its present values."
            )
            return
        self._engine.load(ScaleState.from_dict(state_dict, self._engine.loss_scale.first))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy; the copy creates its tensors at its first loss.

        Raises:
            CallOrderError: In the middle of an iteration.
        """
        iteration = self._engine.iteration
        if iteration.steps or iteration.ledger.entries:
            seen = ", ".join(name(step.optimizer) for step in iteration.steps.values())
            raise CallOrderError(
                "a GradScaler cannot be pickled or copied between unscale_() or step() and "
                f"update(): do it after update(). Seen since the last one: {seen}"
            )
        return self.__dict__ | {
            "_engine": self._engine.loss_scale.first,
            "_saved": self.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state that ``__getstate__`` returned."""
        saved = state.pop("_saved")
        self.__dict__ |= state | {"_engine": Engine(state["_engine"], Ranks(), self)}
        if saved:
            self.load_state_dict(saved)

    # --- internals --------------------------------------------------------------------------------

    def _refuse(self, problem: str, *, is_lasting: bool = False) -> None:
        """Raise for a step with wrong gradients that torch.amp takes silently.

        ``is_lasting``: the loop is built that way, so that other steps have the same problem.
        """
        raise CallOrderError(problem)

    def _overridden(self) -> Set[str]:
        """Return the methods in AS_MADE that a subclass or a patch has replaced."""
        cls, of_object = type(self), self.__dict__
        if _hooks_of(cls) == _AS_MADE and AS_MADE.keys().isdisjoint(of_object):
            return _NONE
        replaced = {hook for hook in AS_MADE if getattr(cls, hook) is not AS_MADE[hook]}
        return replaced | (AS_MADE.keys() & of_object)

    @property
    def _schedule(self) -> Schedule:
        return self._engine.loss_scale.first.schedule

    def _change_schedule(self, **changes: float) -> None:
        if not isinstance(self._schedule, Dynamic):
            raise ValueError(
                f"the schedule {self._schedule} has no {next(iter(changes))}: make the GradScaler "
                "with schedule=Dynamic(...), or leave it out"
            )
        self._engine.loss_scale.set_schedule(replace(self._schedule, **changes))  # type: ignore[arg-type]


AS_MADE = {
    hook: getattr(GradScaler, hook)
    for hook in (
        "unscale_",
        "_unscale_grads_",
        "_maybe_opt_step",
        "_check_inf_per_device",
        "_lazy_init_scale_growth_tracker",
        "_check_scale_growth_tracker",
        "_get_scale_async",
        "_get_growth_tracker",
        "get_scale",
    )
}
"""Methods that PyTorch's scaler calls on itself. So does this one if they are overridden."""

_NONE: frozenset[str] = frozenset()
_hooks_of = attrgetter(*AS_MADE)
_AS_MADE = tuple(AS_MADE.values())
