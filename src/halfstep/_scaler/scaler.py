"""The gradient scaler: what goes beyond the calls of ``torch.amp.GradScaler``.

The algorithm is dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", 2018,
arXiv:1710.03740). What the calls do stands in :mod:`halfstep._scaler.engine`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from halfstep._scaler import clipping, gates
from halfstep._scaler.accumulation import accumulate
from halfstep._scaler.alarm import Alarm, OnSkips
from halfstep._scaler.devices import available_device
from halfstep._scaler.engine import Engine
from halfstep._scaler.optimizers import require_optimizer
from halfstep._scaler.outcome import HistoryEntry, Outcome
from halfstep._scaler.ranks.finding import Ranks
from halfstep._scaler.retrying import retry
from halfstep._scaler.rules import Dynamic, Rule
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.torch_attributes import refuse_never_called
from halfstep._scaler.torch_calls import TorchCalls
from halfstep._torch import keep_out_of_graphs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from halfstep._diagnose.diagnosis import Diagnosis
    from halfstep._diagnose.watch import Watch


class Counts(NamedTuple):
    """How many iterations a scaler has seen; kept in its ``state_dict``.

    Attributes:
        taken: Iterations in which no step was skipped, and no block of ``accumulate`` overflowed.
        skipped: The others.
        skipped_in_a_row: How many of those came last, without one that was taken.
        since: Number of the first of these, counted from 1; None if the last step was taken.
    """

    taken: int
    skipped: int
    skipped_in_a_row: int
    since: int | None


class GradScaler(TorchCalls):
    """Multiplies the loss by a scale so that small gradients survive float16, and undoes it.

    The scale follows the gradients: when one is inf or NaN, the optimizer's step is skipped and the
    scale is multiplied by ``backoff_factor``; after ``growth_interval`` steps in a row it is
    multiplied by ``growth_factor``. If no smaller scale helps, or the loss was not finite to begin
    with, the scale stays and the user is told.

    Has every method of ``torch.amp.GradScaler``; docs/scaler.md lists where they differ on purpose.

    Args:
        device: Device type, such as ``"cuda"``. Left out, the device of the first loss decides.
        init_scale: The first scale, > 0.
        growth_factor: >= 1.
        backoff_factor: In (0, 1]. Both factors at 1 keep the scale as it is.
        growth_interval: Number of steps in a row before the scale grows, >= 1.
        enabled: False makes an object that scales nothing; ``step`` only calls ``optimizer.step``.
        rule: How the scale moves, instead of the three numbers above: ``Dynamic``, ``LogMax`` or
            ``Static``.
        min_scale: The scale does not go below; 1, or ``init_scale`` if that is smaller.
        max_scale: The scale does not grow above; the largest float32 number.
        max_consecutive_skips: After so many skipped steps in a row ``on_skips`` happens, >= 1.
        on_skips: ``"warn"``, ``"raise"`` (:class:`halfstep.errors.SkippedStepsError`), or a
            function that takes the report. It also happens when no smaller scale helps.
        module: The module that is trained, for the names of its parameters; see :meth:`watch`.
        process_group: The ranks that step together and agree on inf and NaN, norms and the scale;
            ``"local"`` for this rank alone. Left out, the parameters tell: DTensors lie on the
            ranks of their mesh, and DistributedDataParallel makes gradients equal. A copy of the
            scaler forgets it.
        device_mesh: The same, as a mesh.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A number is out of range, or PyTorch sees no such device here.

    Sync: none for the constructor; each method says what it costs.

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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return the null object, a subclass, when ``enabled`` is false."""
        enabled = args[5] if len(args) > 5 else kwargs.get("enabled", True)
        if cls is GradScaler and not enabled:
            # Imported here because that class derives from this one.
            from halfstep._scaler.disabled import DisabledGradScaler

            return object.__new__(DisabledGradScaler)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class that overrides what torch.amp.GradScaler calls and this one does not."""
        super().__init_subclass__(**kwargs)
        refuse_never_called(cls)

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        rule: Rule | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        max_consecutive_skips: int = 20,
        on_skips: OnSkips = "warn",
        module: torch.nn.Module | None = None,
        process_group: ProcessGroup | Literal["local"] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        if not enabled:
            raise TypeError(
                f"{type(self).__name__}(enabled=False): a subclass of GradScaler cannot be "
                "switched off this way, use halfstep.GradScaler(enabled=False)"
            )
        self._device = None if device is None else available_device(device)
        if rule is None:
            rule = Dynamic(growth_factor, backoff_factor, growth_interval)
        elif not isinstance(rule, Rule):
            raise TypeError(f"rule is {rule!r}: pass Dynamic(...), LogMax(...) or Static()")
        elif (growth_factor, backoff_factor, growth_interval) != (2.0, 0.5, 2000):
            raise ValueError(
                "growth_factor, backoff_factor and growth_interval are numbers of the rule: give "
                f"them to it, rule={type(rule).__name__}(...), and not to the GradScaler too"
            )
        first = ScaleState.first(init_scale, rule, min_scale, max_scale)
        self._engine = Engine(first, Ranks(process_group, device_mesh))
        self._alarm = Alarm(max_consecutive_skips, on_skips)
        if module is not None:
            self.watch(module)

    def _switch_off(self) -> None:
        """Become an object that scales nothing."""
        from halfstep._scaler.disabled import DisabledGradScaler

        if type(self) is not GradScaler:
            raise TypeError(
                f"{type(self).__name__}._enabled = False: a subclass of GradScaler cannot be "
                "switched off, use halfstep.GradScaler(enabled=False)"
            )
        self.__class__ = DisabledGradScaler

    # What help() and editors show; without it they would show the arguments of __new__.
    __signature__ = inspect.Signature(list(inspect.signature(__init__).parameters.values())[1:])

    # --- the iteration ----------------------------------------------------------------------------

    @keep_out_of_graphs
    def clip_grad_norm_(
        self,
        optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        per: clipping.Per = "all",
    ) -> Tensor:
        """Divide gradients by the scale, if that is still to do, and clip their norm, in place.

        Reads the gradients once and writes them once, where unscaling first and clipping then does
        both twice. ``step(optimizer, max_norm=...)`` does the same inside the step, and needs no
        pass but one to read with a fused optimizer.

        Args:
            optimizer_or_parameters: Whose gradients to clip.
            max_norm: The largest norm, >= 0; ``math.inf`` measures and clips nothing.
            norm_type: 2, ``math.inf``, or another p from 1 to 8.
            per: What the norm is taken of: ``"all"`` gradients together, those of each ``"layer"``
                (the parameters of one module, told by their names: see :meth:`watch`), or each
                ``"parameter"`` alone.

        Returns:
            The norm of all gradients together, unscaled and before clipping: a float32 scalar on
            the device of the scale. If it is inf or NaN nothing is clipped, and ``step`` will skip.

        Raises:
            CallOrderError: Before ``scale``, or after ``step``.
            ValueError: The gradients are float16, or an argument is out of range.

        Sync: none.
        """
        return self._engine.clip_grad_norm_(
            optimizer_or_parameters,
            clipping.checked_max_norm(max_norm),
            *clipping.checked_kind(norm_type, per),
        )

    @keep_out_of_graphs
    def accumulate(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Judge the gradients of one ``backward`` alone before they are added to the others.

        Without it one bad micro-batch costs all that are accumulated. With it only its own
        gradients are dropped, and the others are averaged over those that are left. It is also how
        losses with scales of their own (``scale(loss, name=...)``) share parameters.

        Use one block for each ``backward`` of the iteration and divide the loss by their number.
        After the block ``.grad`` holds the unscaled sum so far. ``step`` skips only if all blocks
        were dropped. An overflow in a dropped block makes the scale back off.

        Memory: one more set of gradients as long as the block is open. Not for gradients that live
        in buckets of DistributedDataParallel.

        Raises:
            CallOrderError: There were gradients before the first block, or the block leaves none.
            ValueError: The gradients are float16.

        Sync: one for each block.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> scaler = GradScaler()
            >>> for batch in [torch.ones(1, 2), torch.full((1, 2), torch.inf)]:
            ...     with scaler.accumulate(optimizer):
            ...         scaler.scale(model(batch).mean() / 2).backward()
            >>> _ = scaler.step(optimizer)
            >>> scaler.update()
            >>> scaler.outcome(optimizer).taken
            True
        """
        require_optimizer("accumulate", optimizer)
        return accumulate(self._engine, optimizer)

    @keep_out_of_graphs
    def retry(self, optimizer: torch.optim.Optimizer, times: int = 2) -> Iterator[int]:
        """Run the same batch again at the smaller scale instead of losing it.

        Put the whole iteration, from ``zero_grad`` to ``update``, into the loop; it runs once, and
        again as long as the step overflowed, at most ``times`` more. Before each repetition the
        random number generators (PyTorch's, Python's, NumPy's if it is loaded) and the buffers of
        watched modules are as they were, and the gradients are zeroed.

        Args:
            optimizer: Whose step decides.
            times: Number of repetitions, >= 0.

        Yields:
            The number of the attempt, 0 for the first.

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
        require_optimizer("retry", optimizer)
        return retry(self._engine, optimizer, times)

    # --- what became of it ------------------------------------------------------------------------

    @keep_out_of_graphs
    def outcome(self, optimizer: torch.optim.Optimizer) -> Outcome:
        """Return what became of the optimizer's last step.

        Sync: none; reading the outcome waits.

        Raises:
            CallOrderError: ``step`` has not been called for this optimizer.
        """
        return self._engine.journal.of(optimizer)

    @keep_out_of_graphs
    def history(self) -> list[HistoryEntry]:
        """Return the last 10,000 steps, oldest first; not saved in ``state_dict``. Sync: one."""
        return self._engine.journal.entries()

    @keep_out_of_graphs
    def counts(self, name: str | None = None) -> Counts:
        """Return how many iterations were taken and skipped, by the scale of a loss. Sync: one."""
        state = self._named(name).read()
        in_a_row = state.skipped_in_a_row
        since = state.num_taken + state.num_skipped - in_a_row + 1 if in_a_row else None
        return Counts(state.num_taken, state.num_skipped, in_a_row, since)

    def watch(self, module: torch.nn.Module) -> None:
        """Take names of parameters from this module; several may be watched.

        The module is held weakly, and a copy of the scaler watches none.

        Raises:
            TypeError: It is no module.
        """
        self._engine.names.watch(module)

    def replicated(self, params: Iterable[Tensor], process_group: ProcessGroup) -> None:
        """Say that parameters have the same gradients on all ranks of a process group.

        For plain parameters whose gradients are averaged by hand: a norm counts them once. It is
        known already of DTensors, of DistributedDataParallel, and of plain parameters beside
        DTensors in one optimizer. All ranks still decide together; see ``process_group``.

        Sync: none.
        """
        self._engine.ranks.replicated(params, process_group)

    @keep_out_of_graphs
    def diagnose(
        self,
        model: torch.nn.Module | None = None,
        tell: Callable[[Diagnosis, int], object] | None = None,
    ) -> Watch:
        """Diagnose the steps that go bad in a block: the op, the module, the line and the cure.

        A step with a loss that is not finite, or one that is skipped beyond what dynamic scaling
        does at its start and after it has grown, is replayed at once; see
        :func:`halfstep.diagnose`, which does that for a step on request.

        Args:
            model: The model; left out, the first module with parameters that is called.
            tell: Is called with each new diagnosis and the number of the step; left out, it is a
                warning.

        Returns:
            A context manager, whose ``found`` are the diagnoses.

        Sync: one a step in the block.

        Example:
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer, scaler = torch.optim.SGD(model.parameters()), GradScaler()
            >>> with scaler.diagnose(model, tell=lambda found, step: print(step, found.verdict)):
            ...     for batch in (torch.ones(2, 4), torch.full((2, 4), float("nan"))):
            ...         optimizer.zero_grad()
            ...         scaler.scale(model(batch).mean()).backward()
            ...         _ = scaler.step(optimizer)
            ...         scaler.update()
            2 data
        """
        # Imported here: what diagnoses stands on top of what scales.
        from halfstep._diagnose.watch import Watch

        return Watch(self._engine if self.is_enabled() else None, model, tell)

    def after_step(
        self,
        optimizer: torch.optim.Optimizer,
        function: Callable[[], object],
        count: gates.Count = "updates",
    ) -> bool:
        """Call a function, such as the update of an average of the weights, if a step was taken.

        Args:
            optimizer: Its last step decides.
            function: What to call.
            count: ``"updates"``: only after a step that was taken; ``"attempts"``: after each.

        Returns:
            Whether it was called.

        Raises:
            CallOrderError: ``step`` has not been called for this optimizer.
            ValueError: ``count`` is neither.

        Sync: one for "updates" with an optimizer that handles the scale itself.
        """
        return gates.after_step(self._engine.journal, optimizer, function, count)

    @keep_out_of_graphs
    def step_scheduler(self, scheduler: Any, count: gates.Count = "updates", *args: Any) -> bool:
        """Call ``scheduler.step()`` if the last step of its optimizer was taken.

        Whether a schedule moves on at a skipped step is disputed, so it is a choice: ``"updates"``
        makes it follow the steps that were taken, ``"attempts"`` all of them. PyTorch's warning
        about the order of calls, which a skipped first step would set off, does not come.

        Args:
            scheduler: A learning rate scheduler of PyTorch, or what has ``step`` and ``optimizer``.
            count: ``"updates"`` or ``"attempts"``.
            *args: What its ``step`` takes: the metric of ``ReduceLROnPlateau``.

        Returns:
            Whether the scheduler moved on.

        Raises:
            CallOrderError: ``step`` has not been called for its optimizer.
            ValueError: ``count`` is neither.

        Sync: as :meth:`after_step`.
        """
        return gates.step_scheduler(self._engine.journal, scheduler, count, args)

    def set_norm_limit(self, times_median: float | None, window: int = 100) -> None:
        """Skip steps, too, whose norm is far above the running median.

        Args:
            times_median: Skip if the norm of the unscaled gradients is above this many times the
                median of the last ``window`` steps taken, > 1; None for no limit. Nothing is
                skipped before half of the window has been seen.
            window: Number of steps, >= 2.

        Raises:
            TypeError: A number is not of the right kind.
            ValueError: A number is out of range.

        Sync: none. Costs one pass more with an optimizer that does not handle the scale itself.
        """
        self._engine.steps.norm_limits.set(times_median, window)
