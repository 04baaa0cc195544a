"""Outcomes of steps: taken or skipped and why, the scale, and the gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from halfstep._common.numbers import power, things
from halfstep._gradients.gradients import Norms, collect, grad_of, is_as_seen, norms_of
from halfstep._gradients.optimizers import Names, writes_unscaled
from halfstep._gradients.scalars import Scalar, round_to_float32
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.devices import to_device
from halfstep._scaler.iteration import Step
from halfstep._scaler.loss_scale import Snapshot, state_of
from halfstep._scaler.ranks import Agreement
from halfstep._scaler.scale_state import Reason, ScaleState, reason
from halfstep.errors import CallOrderError

NUM_WITNESSES = 512
_Refs: TypeAlias = list[weakref.ref[Tensor]]
# Parameters, what was measured, what the gradients are multiplied by if the step was skipped; some
# of the parameters, their gradients, and the versions of these.
_Kept: TypeAlias = tuple[list[Tensor], Norms | None, Scalar | None, list[Tensor], _Refs, list[int]]

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


@dataclass(frozen=True)
class Culprit:
    """A parameter whose gradient is inf or NaN.

    Attributes:
        name: Its name in the watched module, else its position in the optimizer.
        num_inf: Number of entries that are inf or -inf.
        num_nan: Number of entries that are NaN.
        num_entries: Number of entries.
        amax: Largest finite magnitude, multiplied by the scale if the gradient still is.

    The numbers are 0 if the gradient was gone before it could be inspected.
    """

    name: str
    num_inf: int = 0
    num_nan: int = 0
    num_entries: int = 0
    amax: float = 0.0

    def __str__(self) -> str:
        if not self.num_entries:
            return self.name
        bad = [f"{n:,} {what}" for n, what in ((self.num_inf, "inf"), (self.num_nan, "NaN")) if n]
        is_any_finite = self.num_inf + self.num_nan < self.num_entries
        largest = f", largest finite magnitude {self.amax:.3g}" if is_any_finite else ""
        entries = things(self.num_entries, "entry", "entries")
        return f"{self.name}: {' and '.join(bad)} of {entries}{largest}"


class Outcome:
    """The outcome of one call of :meth:`halfstep.GradScaler.step`, read lazily.

    Creating it does not sync. The first read of a property does (sync: one; one for each device for
    ``norms`` and ``culprits``); later reads do not. It cannot be pickled or copied; the entries of
    ``GradScaler.history`` can.

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

    is_left_out = False
    """Whether the caller has unscaled the gradients and then left out the step."""

    after: Snapshot | None = None
    """The state after ``update``."""

    # Of a taken step that measured nothing, decided by the host alone.
    _loss_is_finite: bool | None = True  # None if only the device knows if the step was skipped
    _found_before: Scalar = 1.0
    _agreements: Sequence[Agreement] = ()
    _squares: Scalar | None = None
    _measured_scale: Scalar = 1.0

    def __init__(
        self, step: Step, names: Names, is_fused: bool = False, versions: list[int] | None = None
    ) -> None:
        """Keep the results of a decided step; parameters instead of gradients, to save memory."""
        optimizer, skip, norms = step.optimizer, step.skip, step.norms
        assert optimizer is not None
        assert skip is not None
        self.optimizer_name = type(optimizer).__name__
        self._optimizer = weakref.ref(optimizer)
        self._names, self.loss_scale = names, step.loss_scale
        self._before, self.num_losses = step.loss_scale.snapshot(), step.num_losses
        self._is_fused = is_fused
        # Whether inf or NaN was found, also before the second look.
        self._found_inf = skip
        if step.found_inf is not None:
            self._found_before = step.found_inf
        if isinstance(skip, Tensor):
            self._loss_is_finite = None
        elif skip:
            self._loss_is_finite = step.loss_scale.loss_is_finite()
        if step.ranks.is_together:
            self._agreements = step.agreements()
        # Used to detect zero_grad() and a new backward(), which affect almost all gradients. If
        # norms were measured, the gradients are not read again, and the first one suffices.
        gradients, some = step.gradients, slice(None)
        if norms is not None:
            # The sum of squares as measured, and what the gradients were multiplied by.
            self._squares, some = norms.squares, slice(1)
            self._measured_scale = 1.0 if norms.scale is None else norms.scale
        elif len(gradients.grads) > NUM_WITNESSES:
            some = slice(None, None, len(gradients.grads) - 1)
        refs = list(map(weakref.ref, gradients.grads[some]))
        versions = (versions or gradients.versions())[some]
        params = gradients.params
        # Only of the last outcome of the optimizer.
        self._kept: _Kept | None = params, norms, step.multiplier, params[some], refs, versions

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

    @torch.no_grad()
    def find_culprits(self) -> list[Culprit]:
        """Count inf and NaN in the current gradients; return only names if these are gone.

        Slow and with syncs: only for messages.
        """
        if self._kept is None:
            return []
        gradients, found = collect(self._kept[0]), []
        names = self._names.of(gradients.params, self._optimizer())
        for name, values in zip(names, gradients.values, strict=True):
            finite = values.isfinite()
            num_bad = values.numel() - int(finite.sum())
            if num_bad:
                num_nan = int(values.isnan().sum())
                amax = values.abs().where(finite, 0).max().item()
                found.append(Culprit(name, num_bad - num_nan, num_nan, values.numel(), amax))
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
        if not (self.after is None or isinstance(self.after, tuple)):
            return self.after.during()
        is_finite = self.has_ended or not found_inf or self.loss_scale.loss_is_finite()
        return state_of(self._before), is_finite

    def _kept_params(self) -> list[Tensor]:
        if self._kept is None:
            raise CallOrderError(
                "norms and culprits are kept for the last step of each optimizer only, and this "
                "outcome is older"
            )
        return self._kept[0]

    @cached_property
    @keep_out_of_graphs
    def _norms(self) -> list[float]:
        self._kept_params()  # raises if they are not kept
        assert self._kept is not None
        params, measured, multiplier, *_ = self._kept
        if self._is_fused and not self.is_measured and self.taken:
            optimizer = self._optimizer()
            # Small float16 gradients may become zero when the optimizer unscales them.
            is_float16 = torch.float16 in {param.dtype for param in params}
            if is_float16 or optimizer is None or not writes_unscaled(optimizer):
                raise CallOrderError(
                    f"the optimizer {self.optimizer_name} has divided the gradients by itself, and "
                    "they were not measured before: " + HOW_TO_MEASURE
                )
        if measured is not None:
            return measured.unscaled()
        if not has_its_gradients(self):
            raise CallOrderError(
                "the gradients of this step were not measured and are gone: read norm, "
                "norms and culprits of an outcome before zero_grad() and the next backward(), "
                "or " + HOW_TO_MEASURE
            )
        return norms_of(collect(params), multiplier if self.skipped else None).unscaled()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Outcome cannot be pickled or copied: pass on what you read from it, or its entry "
            "in scaler.history(), which has plain values"
        )

    def __repr__(self) -> str:
        """Return a one-line summary. Sync: one."""
        verdict = "taken" if self.taken else f"skipped, {self.reason}"
        if self.rank is not None:
            verdict += f", rank {self.rank}"
        after = "" if self.after is None else f" -> {power(self.scale_after)}"
        norm = "" if self._squares is None else f"; norm {self.norm:.4g}"
        return f"Outcome({self.optimizer_name}: {verdict}; scale {power(self.scale)}{after}{norm})"


# --- for other files of halfstep ------------------------------------------------------------------


def has_its_gradients(outcome: Outcome) -> bool:
    """Return whether the gradients are still those of the step. Sync: none."""
    if outcome._kept is None:
        return False
    *_, params, refs, versions = outcome._kept
    return all(map(is_as_seen, zip(refs, versions, strict=True), map(grad_of, params)))


def _numbers(outcome: Outcome) -> list[Scalar]:
    squares = math.nan if outcome._squares is None else outcome._squares
    return [outcome._found_inf, outcome._found_before, squares, outcome._measured_scale]


def pack(outcome: Outcome) -> Tensor:
    """Return float32 numbers for :func:`unpack`; empty if all is on the host. Sync: none."""
    numbers, found_inf = _numbers(outcome), outcome._found_inf
    if not isinstance(found_inf, Tensor):
        return torch.empty(0, device="cpu")
    return torch.stack(
        [n if isinstance(n, Tensor) else torch.full_like(found_inf, n) for n in numbers]
    )


def unpack(outcome: Outcome, packed: Tensor) -> tuple[HistoryEntry, float | None]:
    """Return the entry, and the scale after ``update`` (None before it)."""
    numbers = packed.tolist() if len(packed) else map(float, _numbers(outcome))
    found_inf, before, squares, scale = numbers
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
