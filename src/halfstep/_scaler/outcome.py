"""What became of a step: taken or skipped, why, at which scale, with which gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._scaler.alarm import Culprit, culprits
from halfstep._scaler.device_state import StateSnapshot
from halfstep._scaler.gradients import Gradients, collect
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.names import Names
from halfstep._scaler.optimizers import name
from halfstep._scaler.passes import Norms, measure
from halfstep._scaler.ranks.agreement import Agreement
from halfstep._scaler.scalars import moved
from halfstep._scaler.scale_state import Reason, reason
from halfstep._torch import keep_out_of_graphs
from halfstep.errors import CallOrderError

NUM_WITNESSES = 512
HOW_TO_MEASURE = "let step() measure them: scaler.step(optimizer, max_norm=math.inf)"


class HistoryEntry(NamedTuple):
    """One step in ``GradScaler.history()``, all in plain Python values.

    Attributes:
        step: Number of the iteration, counted from 1 by ``update``.
        optimizer: Class name of the optimizer.
        taken: Whether ``optimizer.step`` did its work.
        reason: Why not, None if taken.
        scale: The scale that the loss was multiplied by.
        norm: L2 norm of the unscaled gradients, NaN if it was not measured.
    """

    step: int
    optimizer: str
    taken: bool
    reason: Reason | None
    scale: float
    norm: float


@dataclass(frozen=True, eq=False)
class Findings:
    """What a step found, still on the device.

    Attributes:
        before: State of the scale when ``optimizer.step`` was due.
        found_inf: float32 scalar, 1 if a gradient is inf or NaN, else 0.
        outlier: The same for a norm that is too large to be believed; None if not asked.
        norm: Norm of the unscaled gradients, before clipping; None if not measured.
        agreements: What all ranks have found, of each look at the gradients, if several decide.
    """

    before: StateSnapshot
    found_inf: Tensor
    outlier: Tensor | None
    norm: Tensor | None
    agreements: Sequence[Agreement] = ()

    def on_cpu(self) -> Findings:
        """Return a copy on the CPU, without the agreements. Sync: some."""
        outlier = None if self.outlier is None else self.outlier.cpu()
        norm = None if self.norm is None else self.norm.cpu()
        return Findings(self.before.on_cpu(), self.found_inf.cpu(), outlier, norm)

    def row(self) -> list[Tensor]:
        """Return found_inf, outlier and norm as three scalars."""
        missing = torch.full_like(self.found_inf, math.nan)
        return [
            self.found_inf,
            torch.zeros_like(missing) if self.outlier is None else self.outlier,
            missing if self.norm is None else self.norm.to(missing),
        ]


class StepGradients:
    """The gradients of the last step of an optimizer: measured then, or looked at again.

    Args:
        gradients: As they are when ``step`` returns. Only the parameters are kept: the memory of
            the gradients belongs to the user.
        norms: Their norms, if they were measured.
        scale: What they are multiplied by now, None for nothing.
    """

    def __init__(self, gradients: Gradients, norms: Norms | None, scale: Tensor | None) -> None:
        self.params = gradients.params
        self._norms = norms
        self._scale = scale
        # To notice zero_grad() and a new backward(), which touch almost all of them. Measured ones
        # are not read again, and the first of them tells enough.
        self._is_measured = norms is not None
        self._witnesses = [
            (weakref.ref(grad), grad._version)
            for grad in (gradients.grads[:1] if self._is_measured else _witnesses(gradients.grads))
        ]

    @keep_out_of_graphs
    def norms(self) -> list[float]:
        """Return the unscaled norm of every gradient. Sync: one for each device.

        Raises:
            CallOrderError: They were not measured and are gone.
        """
        if self._norms is None:
            self._require_present()
            self._norms = measure(collect(self.params), self._scale)
        return self._norms.unscaled()

    def are_present(self) -> bool:
        """Return whether nobody has written to the gradients since. Sync: none."""
        watched = self.params[:1] if self._is_measured else _witnesses(self.params)
        return all(
            param.grad is not None and ref() is param.grad and param.grad._version == version
            for (ref, version), param in zip(self._witnesses, watched, strict=True)
        )

    def _require_present(self) -> None:
        if not self.are_present():
            raise CallOrderError(
                "the gradients of this step were not measured and are gone: look at norm, "
                "norms and culprits of an outcome before zero_grad() and the next backward(), "
                "or " + HOW_TO_MEASURE
            )


def _witnesses(tensors: list[Tensor]) -> list[Tensor]:
    """Return all of a few tensors, of many only the ends: asking them takes its time."""
    return tensors if len(tensors) <= NUM_WITNESSES else [tensors[0], tensors[-1]]


class Outcome:
    """One call of :meth:`halfstep.GradScaler.step`, read late.

    Making it waits for nothing. The first look at a property waits for the device (sync: one, one
    for each device for ``norms`` and ``culprits``); the next ones do not. One that is pickled or
    copied is read then: the copy keeps all that can be read, on the CPU, without the optimizer.

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
        Outcome(SGD: skipped, loss; scale 65536 -> 65536; norm inf)
        >>> scaler.outcome(optimizer).culprits
        ['weight', 'bias']
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        loss_scale: LossScale,
        findings: Findings,
        gradients: StepGradients,
        *,
        can_measure_late: bool = True,
    ) -> None:
        self._can_measure_late = can_measure_late
        self.optimizer_name = name(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self.loss_scale = loss_scale
        self._rule = loss_scale.host
        self._findings = findings
        self._gradients: StepGradients | None = gradients
        self._after: StateSnapshot | None = None

    def end(self) -> None:
        """Take note of the state after ``update``. Sync: none."""
        self._after = self.loss_scale.snapshot()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, None if it is gone. Sync: none."""
        return self._optimizer()

    @property
    def has_ended(self) -> bool:
        """Whether ``update`` has been called since the step. Sync: none."""
        return self._after is not None

    def has_its_gradients(self) -> bool:
        """Return whether the gradients are still those of this step. Sync: none."""
        return self._gradients is not None and self._gradients.are_present()

    def forget_gradients(self) -> None:
        """Drop what is kept only for the last step of an optimizer."""
        self._gradients = None

    @property
    def taken(self) -> bool:
        """Whether the optimizer's step was taken."""
        return not self.skipped

    @property
    def skipped(self) -> bool:
        """Whether it was skipped."""
        if "entry" in vars(self):
            return not self.entry.taken
        found = (self._findings.found_inf, self._findings.outlier)
        return any(bool(flag.item()) for flag in found if flag is not None)

    @property
    def reason(self) -> Reason | None:
        """Why it was skipped, None if it was taken."""
        return self.entry.reason

    @cached_property
    def rank(self) -> int | None:
        """The first rank whose loss was inf or NaN, else whose gradients were.

        None if there was none, or if the ranks did not have to tell each other: with one of them,
        or under DistributedDataParallel, which gives all the same gradients.
        """
        ranks = [agreement.first_rank() for agreement in self._findings.agreements]
        return min((rank for rank in ranks if rank is not None), default=None)

    @property
    def scale(self) -> float:
        """The scale that the loss was multiplied by."""
        return self.entry.scale

    @cached_property
    def scale_after(self) -> float:
        """The scale after ``update``.

        Raises:
            CallOrderError: ``update`` has not been called yet.
        """
        if self._after is None:
            raise CallOrderError("outcome.scale_after before update(): call scaler.update() first")
        return self._after.read(self._rule).scale

    @property
    def is_measured(self) -> bool:
        """Whether the norm was measured during the step. Sync: none."""
        return self._findings.norm is not None

    @cached_property
    def norm(self) -> float:
        """L2 norm of all gradients of the optimizer together, unscaled and before clipping.

        Raises:
            CallOrderError: It was not measured and the gradients are gone.
        """
        measured = self.entry.norm
        if not self.is_measured and self._findings.agreements:
            raise CallOrderError(
                "outcome.norm: the gradients of this step are spread over several ranks, and their "
                "norm was not measured: " + HOW_TO_MEASURE
            )
        return measured if self.is_measured else math.hypot(*self._norms)

    @cached_property
    def norms(self) -> dict[str, float]:
        """L2 norm of every gradient by parameter name, unscaled and before clipping.

        Of a DTensor, of what this rank holds of it.

        Raises:
            CallOrderError: They were not measured and the gradients are gone.
        """
        norms = self._norms
        assert self._gradients is not None
        names = self._names.of(self._gradients.params, self._optimizer())
        return dict(zip(names, norms, strict=True))

    @cached_property
    def culprits(self) -> list[str]:
        """Names of the parameters whose gradients, on this rank, are inf or NaN.

        Raises:
            CallOrderError: They were not measured and the gradients are gone.
        """
        return self._names.of(self.culprit_parameters(), self._optimizer())

    def culprit_parameters(self) -> list[Tensor]:
        """Return the parameters that :attr:`culprits` names."""
        norms, gradients = self._norms, self._gradients
        assert gradients is not None
        pairs = zip(gradients.params, norms, strict=True)
        return [param for param, norm in pairs if not math.isfinite(norm)]

    def find_culprits(self) -> list[Culprit]:
        """Count inf and NaN in the gradients as they are now; names only if they are gone."""
        if self._gradients is None:
            return []
        gradients = collect(self._gradients.params)
        found = culprits(gradients, self._names.of(gradients.params, self._optimizer()))
        try:
            return found or [Culprit(name) for name in self.culprits]
        except CallOrderError:
            return []

    @cached_property
    def entry(self) -> HistoryEntry:
        """The outcome as one row of ``GradScaler.history()``."""
        return read_all([self])[0]

    def packed(self) -> Tensor:
        """Return a vector of float32 for :meth:`unpack`, on the device of the scale. Sync: none."""
        states = [self._findings.before, *([] if self._after is None else [self._after])]
        values = [state.values.view(torch.float32) for state in states]
        return torch.cat([torch.stack(self._findings.row()), *values])

    def unpack(self, packed: Tensor) -> tuple[HistoryEntry, float | None]:
        """Return the entry, and the scale after ``update`` if it has been called.

        Args:
            packed: What :meth:`packed` has returned, on the CPU.
        """
        found_inf, outlier, norm = packed[:3].tolist()
        state, end = StateSnapshot(packed[3:]), 3 + len(self._findings.before.values)
        before, loss_is_finite = state.read_with_loss(self._rule)
        why = reason(before, bool(found_inf), loss_is_finite, bool(outlier))
        step = before.num_taken + before.num_skipped + 1
        entry = HistoryEntry(step, self.optimizer_name, why is None, why, before.scale, norm)
        after = StateSnapshot(packed[end:]).read(self._rule) if len(packed) > end else None
        return entry, None if after is None else after.scale

    @cached_property
    def _norms(self) -> list[float]:
        if self._gradients is None:
            raise CallOrderError(
                "norms and culprits are kept for the last step of each optimizer only, and this "
                "outcome is older, or a copy of such a one"
            )
        if not self._can_measure_late and self._findings.norm is None and self.taken:
            raise CallOrderError(
                f"the optimizer {self.optimizer_name} has divided the gradients by itself, and "
                "they were not measured before: " + HOW_TO_MEASURE
            )
        return self._gradients.norms()

    @keep_out_of_graphs
    def __getstate__(self) -> dict[str, object]:
        """Return plain values and tensors on the CPU. Sync: as reading all properties."""
        state: dict[str, object] = {
            "optimizer_name": self.optimizer_name,
            "rank": self.rank,
            "_rule": self._rule,
            "_findings": self._findings.on_cpu(),
            "_after": None if self._after is None else self._after.on_cpu(),
        }
        for what in ("norm", "norms", "culprits"):
            with suppress(CallOrderError):
                state[what] = getattr(self, what)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        """Make an outcome of a step that was elsewhere, or is over."""
        self.__dict__ |= state | {"_optimizer": _gone, "_names": Names(), "_gradients": None}

    def __repr__(self) -> str:
        """Return all of it in a line. Sync: one."""
        verdict = "taken" if self.taken else f"skipped, {self.reason}"
        if self.rank is not None:
            verdict += f", rank {self.rank}"
        after = "" if self._after is None else f" -> {self.scale_after:g}"
        norm = "" if self._findings.norm is None else f"; norm {self.norm:.4g}"
        return f"Outcome({self.optimizer_name}: {verdict}; scale {self.scale:g}{after}{norm})"


def _gone() -> None:
    """Stand for a weak reference to an optimizer that is not here."""


@keep_out_of_graphs
def read_all(outcomes: Sequence[Outcome]) -> list[HistoryEntry]:
    """Read many outcomes at once. Sync: one, however many they are."""
    if not outcomes:
        return []
    packed = [outcome.packed() for outcome in outcomes]
    together = torch.cat([moved(values, packed[0].device) for values in packed]).cpu()
    parts = torch.split(together, [len(values) for values in packed])
    return [outcome.unpack(part)[0] for outcome, part in zip(outcomes, parts, strict=True)]
