"""Outcomes of steps: taken or skipped and why, the scale, and the gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._common.numbers import power
from halfstep._gradients.gradients import Gradients, collect, is_as_seen, seen
from halfstep._gradients.norms import norms_of
from halfstep._gradients.optimizers import Names
from halfstep._gradients.scalars import Scalar, round_to_float32
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.devices import to_device
from halfstep._scaler.agreement import Agreement
from halfstep._scaler.culprits import Culprit, culprits
from halfstep._scaler.iteration import Decided, Measured
from halfstep._scaler.loss_scale import LossScale, Snapshot, state_of
from halfstep._scaler.scale_state import Reason, ScaleState, reason
from halfstep._scaler.updates import PendingUpdate
from halfstep.errors import CallOrderError

NUM_WITNESSES = 512
HOW_TO_MEASURE = "let step() measure them: scaler.step(optimizer, max_norm=math.inf)"


class HistoryEntry(NamedTuple):
    """One step in ``GradScaler.history()``, in plain Python values.

    Attributes:
        step: Number of the iteration; each ``update`` counts one, from 1.
        optimizer: Class name of the optimizer.
        taken: Whether the optimizer made the step.
        reason: Why it was skipped, None if taken.
        scale: The scale that the loss was multiplied by.
        norm: L2 norm of the unscaled gradients, NaN if not measured.
    """

    step: int
    optimizer: str
    taken: bool
    reason: Reason | None
    scale: float
    norm: float


class Counts(NamedTuple):
    """The numbers of iterations of a scaler; kept in its ``state_dict``.

    Attributes:
        taken: Iterations in which no step was skipped.
        skipped: All other iterations.
        skipped_in_a_row: Number of skipped iterations since the last taken one.
        since: Number of the first of these, counted from 1; None if the last one was taken.
    """

    taken: int
    skipped: int
    skipped_in_a_row: int
    since: int | None


class Outcome:
    """The outcome of one call of :meth:`halfstep.GradScaler.step`, read lazily.

    Creating it does not sync. The first read of a property does (sync: one; one for each device for
    ``norms`` and ``culprits``); later reads do not. Pickling or copying reads everything: the copy
    keeps all readable values, on the CPU, without the optimizer.

    Example:
        >>> import halfstep
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = halfstep.GradScaler(module=model)
        >>> loss = (model(torch.ones(1, 2)) * torch.inf).sum()
        >>> scaler.scale(loss).backward()
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.outcome(optimizer)
        Outcome(SGD: skipped, loss; scale 2^16 -> 2^15; norm inf)
        >>> scaler.outcome(optimizer).culprits
        ['weight', 'bias']
    """

    num_losses = 0
    """Number of losses that had been scaled in the iteration when the step was made."""

    is_left_out = False
    """Whether the caller has unscaled the gradients and then left out the step."""

    after: Snapshot | None = None
    """The state after ``update``."""

    _agreements: Sequence[Agreement] = ()
    _found_before: Scalar | None = None  # without the second look; None if there was none

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        loss_scale: LossScale,
        gradients: Gradients,
        skip: Scalar,
        multiplier: Scalar | None,
        measured: Measured | None,
        can_measure_late: bool,
    ) -> None:
        """Keep the results of a step, and the parameters instead of the gradients, to save memory.

        Args:
            optimizer: The optimizer.
            names: Names of parameters.
            loss_scale: The scale of the losses.
            gradients: The gradients.
            skip: 1 if the step was skipped, else 0.
            multiplier: The number by which the gradients are multiplied now, None if unscaled.
            measured: The gradients before any clipping, if they were measured.
            can_measure_late: Whether the unscaled gradients still have their original values.
        """
        self.optimizer_name = type(optimizer).__name__
        self._optimizer = weakref.ref(optimizer)
        self._names, self.loss_scale = names, loss_scale
        self._before = loss_scale.snapshot()
        # None if only the device knows whether the step was skipped.
        self._loss_is_finite: bool | None = None
        if not isinstance(skip, Tensor):
            self._loss_is_finite = not skip or loss_scale.loss_is_finite()
        self._found_inf = skip
        # The following is kept only while this is the last outcome of the optimizer.
        self._multiplier, self._can_measure_late = multiplier, can_measure_late
        # Those that were measured: gradients may have been replaced since clip_grad_norm_().
        self._measured = norms = None if measured is None else measured.norms
        self._params: list[Tensor] | None = gradients.params if norms is None else norms.params
        # The sum of squares as measured, and what the gradients were multiplied by.
        self._squares = None if measured is None else measured.squares
        self._measured_scale = None if norms is None else norms.scale
        # Used to detect zero_grad() and a new backward(), which affect almost all gradients. If
        # norms were measured, the gradients are not read again, and the first one suffices.
        params, grads = gradients.params, gradients.grads
        if norms is not None:
            params, grads = params[:1], grads[:1]
        elif len(grads) > NUM_WITNESSES:
            params, grads = [params[0], params[-1]], [grads[0], grads[-1]]
        self._witnesses = params, seen(grads)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, None if it no longer exists. Sync: none."""
        return self._optimizer()

    @property
    def has_ended(self) -> bool:
        """Whether ``update`` has been called since the step. Sync: none."""
        return self.after is not None

    @property
    def taken(self) -> bool:
        """Whether the optimizer's step was taken."""
        return not self.skipped

    @property
    def skipped(self) -> bool:
        """Whether the optimizer's step was skipped."""
        if "_entry" in vars(self):
            return not self._entry.taken
        return bool(self._found_inf) or self.is_left_out

    @property
    def reason(self) -> Reason | None:
        """Why the step was skipped, None if it was taken."""
        return self._entry.reason

    @cached_property
    def rank(self) -> int | None:
        """The first rank whose loss was inf or NaN, otherwise whose gradients were.

        None if there was none, or if the ranks did not exchange it: with a single rank, or under
        DistributedDataParallel, which gives all ranks the same gradients.
        """
        ranks = [agreement.first_rank() for agreement in self._agreements]
        return min((rank for rank in ranks if rank is not None), default=None)

    @property
    def scale(self) -> float:
        """The scale that the loss was multiplied by."""
        return self._entry.scale

    @cached_property
    def scale_after(self) -> float:
        """The scale after ``update``.

        Raises:
            CallOrderError: ``update`` has not been called yet.
        """
        if self.after is None:
            raise CallOrderError("outcome.scale_after before update(): call scaler.update() first")
        return state_of(self.after).scale

    @property
    def is_measured(self) -> bool:
        """Whether the norm was measured during the step. Sync: none."""
        return self._squares is not None

    @cached_property
    def norm(self) -> float:
        """L2 norm of all gradients of the optimizer together, unscaled and before clipping.

        Raises:
            CallOrderError: It was not measured, and the gradients have been replaced.
        """
        measured = self._entry.norm
        if not self.is_measured and self._agreements:
            raise CallOrderError(
                "outcome.norm: the gradients of this step are spread over several ranks, and their "
                "norm was not measured: " + HOW_TO_MEASURE
            )
        return measured if self.is_measured else math.hypot(*self._norms)

    @cached_property
    def norms(self) -> dict[str, float]:
        """L2 norm of every gradient by parameter name, unscaled and before clipping.

        For a DTensor, the norm of its local part.

        Raises:
            CallOrderError: They were not measured, and the gradients have been replaced.
        """
        norms, params = self._norms, self._kept_params()
        return dict(zip(self._names.of(params, self._optimizer()), norms, strict=True))

    @cached_property
    def culprits(self) -> list[str]:
        """Names of the parameters whose gradients on this rank are inf or NaN.

        Raises:
            CallOrderError: They were not measured, and the gradients have been replaced.
        """
        return self._names.of(self.culprit_parameters(), self._optimizer())

    def culprit_parameters(self) -> list[Tensor]:
        """Return the parameters named in :attr:`culprits`."""
        norms, params = self._norms, self._kept_params()
        pairs = zip(params, norms, strict=True)
        return [param for param, norm in pairs if not math.isfinite(norm)]

    def find_culprits(self) -> list[Culprit]:
        """Count inf and NaN in the current gradients; return only names if these are gone."""
        if self._params is None:
            return []
        gradients = collect(self._params)
        found = culprits(gradients, self._names.of(gradients.params, self._optimizer()))
        try:
            return found or [Culprit(name) for name in self.culprits]
        except CallOrderError:
            return []

    @cached_property
    def _entry(self) -> HistoryEntry:
        return read_all([self])[0]

    def _state_of_step(self, found_inf: bool) -> tuple[ScaleState, bool]:
        """Return the state during the step, and whether the loss was finite."""
        if self._loss_is_finite is not None:
            return state_of(self._before), self._loss_is_finite
        if isinstance(self.after, PendingUpdate):
            return self.after.states()[0], self.after.found().loss_is_finite
        is_finite = self.has_ended or not found_inf or self.loss_scale.loss_is_finite()
        return state_of(self._before), is_finite

    def _kept_params(self) -> list[Tensor]:
        if self._params is None:
            raise CallOrderError(
                "norms and culprits are kept for the last step of each optimizer only, and this "
                "outcome is older, or a copy of such a one"
            )
        return self._params

    @cached_property
    @keep_out_of_graphs
    def _norms(self) -> list[float]:
        params = self._kept_params()
        if not self._can_measure_late and not self.is_measured and self.taken:
            raise CallOrderError(
                f"the optimizer {self.optimizer_name} has divided the gradients by itself, and "
                "they were not measured before: " + HOW_TO_MEASURE
            )
        if self._measured is not None:
            return self._measured.unscaled()
        if not has_its_gradients(self):
            raise CallOrderError(
                "the gradients of this step were not measured and are gone: read norm, "
                "norms and culprits of an outcome before zero_grad() and the next backward(), "
                "or " + HOW_TO_MEASURE
            )
        return norms_of(collect(params), self._multiplier).unscaled()

    @keep_out_of_graphs
    def __getstate__(self) -> dict[str, object]:
        """Return plain values and CPU tensors. Sync: as for reading all properties."""
        state: dict[str, object] = {
            "optimizer_name": self.optimizer_name,
            "rank": self.rank,
        }
        before, loss_is_finite = self._state_of_step(self.skipped)
        state |= {
            "is_left_out": self.is_left_out,
            "_before": before,
            "_loss_is_finite": loss_is_finite,
        }
        state["after"] = None if self.after is None else state_of(self.after)
        for what in ("_found_inf", "_found_before", "_squares", "_measured_scale"):
            value = getattr(self, what)
            state[what] = None if value is None else float(value)
        for what in ("norm", "norms", "culprits"):
            with suppress(CallOrderError):
                state[what] = getattr(self, what)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore an outcome whose step was in another process, or is over."""
        self.__dict__ |= state | {"_optimizer": lambda: None, "_names": Names(), "_agreements": ()}
        forget_gradients(self)

    def __repr__(self) -> str:
        """Return a one-line summary. Sync: one."""
        verdict = "taken" if self.taken else f"skipped, {self.reason}"
        if self.rank is not None:
            verdict += f", rank {self.rank}"
        after = "" if self.after is None else f" -> {power(self.scale_after)}"
        norm = "" if self._squares is None else f"; norm {self.norm:.4g}"
        return f"Outcome({self.optimizer_name}: {verdict}; scale {power(self.scale)}{after}{norm})"


# --- for other files of halfstep ------------------------------------------------------------------


def outcome_of(
    decided: Decided,
    optimizer: torch.optim.Optimizer,
    names: Names,
    multiplier: Scalar | None,
    *,
    can_measure_late: bool,
) -> Outcome:
    """Return the outcome of a step as it ended; ``multiplier``: that of the gradients now."""
    checked, gathered = decided.checked, decided.checked.gathered
    outcome = Outcome(
        optimizer,
        names,
        gathered.loss_scale,
        gathered.gradients,
        decided.skip,
        multiplier,
        checked.unclipped,
        can_measure_late,
    )
    outcome._found_before = decided.found_inf
    if gathered.ranks.is_together:
        outcome._agreements = checked.agreements()
    return outcome


def has_its_gradients(outcome: Outcome) -> bool:
    """Return whether the gradients are still those of the step. Sync: none."""
    return outcome._params is not None and all(
        is_as_seen(earlier, param.grad) for param, earlier in zip(*outcome._witnesses, strict=True)
    )


def forget_gradients(outcome: Outcome) -> None:
    """Release the data that is kept only for the last step of an optimizer."""
    outcome._params = outcome._measured = outcome._multiplier = None
    outcome._witnesses = [], []


def pack(outcome: Outcome) -> Tensor:
    """Return float32 numbers for :func:`unpack`; empty if all is on the host. Sync: none."""
    found_inf = outcome._found_inf
    if not isinstance(found_inf, Tensor):
        return torch.empty(0, device="cpu")
    row = [found_inf]
    before = outcome._found_before
    values = (before, 1.0), (outcome._squares, math.nan), (outcome._measured_scale, 1.0)
    for value, default in values:
        if not isinstance(value, Tensor):
            value = torch.full_like(found_inf, default if value is None else value)
        row.append(value)
    return torch.stack(row)


def unpack(outcome: Outcome, packed: Tensor) -> tuple[HistoryEntry, float | None]:
    """Return the entry, and the scale after ``update`` (None before it)."""
    if len(packed):
        found_inf, before, squares, scale = packed.tolist()
    else:
        assert not isinstance(outcome._found_inf, Tensor)
        found_inf = outcome._found_inf
        before = 1.0 if outcome._found_before is None else float(outcome._found_before)
        squares = math.nan if outcome._squares is None else float(outcome._squares)
        scale = 1.0 if outcome._measured_scale is None else float(outcome._measured_scale)
    norm = round_to_float32(math.sqrt(squares) / scale)
    state, loss_is_finite = outcome._state_of_step(bool(found_inf))
    why = reason(state, bool(found_inf), loss_is_finite)
    if why is not None and not before:
        why = Reason.AFTER_UNSCALE
    if why is None and outcome.is_left_out:
        why = Reason.LEFT_OUT
    number = state.num_taken + state.num_skipped + 1
    entry = HistoryEntry(number, outcome.optimizer_name, why is None, why, state.scale, norm)
    return entry, None if outcome.after is None else outcome.scale_after


@keep_out_of_graphs
def read_all(outcomes: Sequence[Outcome]) -> list[HistoryEntry]:
    """Read several outcomes at once. Sync: one in total."""
    if not outcomes:
        return []
    packed = [pack(outcome) for outcome in outcomes]
    together = torch.cat([to_device(values, packed[0].device) for values in packed]).cpu()
    parts = torch.split(together, [len(values) for values in packed])
    return [unpack(outcome, part)[0] for outcome, part in zip(outcomes, parts, strict=True)]
