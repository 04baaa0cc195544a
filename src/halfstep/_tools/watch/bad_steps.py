"""Signs of a bad step: values that are not finite, unexpected skips, and weights that explode."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._common.numbers import number
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import members
from halfstep._pytorch import amp, distributed, modes
from halfstep._scaler import Outcome, Reason
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis
from halfstep._tools.diagnose.trials import HIDES
from halfstep._tools.measure import NAN, badness, is_finite
from halfstep._tools.watch.skips import ScaleSearch, Search, are_a_start, are_rare


class Skips:
    """Skips of one scaler, judged as they happen."""

    def __init__(self) -> None:
        self._search = ScaleSearch()
        self._num = 0
        self._kinds: Counter[Search | None] = Counter()

    def judge(self, outcomes: Sequence[Outcome]) -> tuple[Search | None, list[Outcome]]:
        """Return which part of the search for a scale an iteration is, and its bad outcomes.

        A skip is bad if dynamic scaling does not explain it. Sync: one for a fused optimizer.
        """
        self._num += 1
        skipped = [outcome for outcome in outcomes if not outcome.taken]
        kind = self._search.kind_of(
            outcomes[-1].scale,
            skipped[-1].scale_after if skipped else 0.0,
            is_taken=not skipped,
            is_overflow=all(outcome.reason is Reason.OVERFLOW for outcome in skipped),
        )
        self._kinds[kind] += 1
        are_few = are_a_start if kind == "start" else are_rare
        if kind is not None and are_few(self._kinds[kind], self._num):
            return kind, []
        return None, skipped


# --- checks of losses and gradients, hidden from the loop -----------------------------------------


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors are finite; True if that cannot be told. Sync: one for each."""
    with modes.unseen_by_modes(), suppress(Exception):  # a subclass may lack the functions
        return all(map(is_finite, tensors))
    return True


def have_finite_gradients(weights: Iterable[Tensor]) -> bool:
    """Return whether all gradients of weights are finite. Sync: one for each device."""
    with modes.unseen_by_modes(), torch.no_grad():
        grads = [weight.grad for weight in weights if weight.grad is not None]
        dense = [grad for grad in grads if _is_plain(grad)]
        norms = _values_of(amp.norms_of_each(dense)) if dense else []
        # A norm may overflow although all entries are finite, and other layouts may have no norm:
        # check the entries of these gradients.
        doubtful = [g for g, norm in zip(dense, norms, strict=True) if not math.isfinite(norm)]
        return are_finite([*doubtful, *(g for g in grads if not _is_plain(g))])


def _values_of(norms: Sequence[Tensor]) -> list[float]:
    on_each: dict[torch.device, list[Tensor]] = {}
    for norm in norms:
        on_each.setdefault(norm.device, []).append(norm.float())
    values = {device: iter(torch.stack(some).tolist()) for device, some in on_each.items()}
    return [next(values[norm.device]) for norm in norms]


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.layout is torch.strided and grad.is_floating_point()


def has_nan(model: nn.Module) -> bool:
    """Return whether a gradient of a model contains a NaN. Sync: one for each gradient."""
    with modes.unseen_by_modes():
        return any(p.grad is not None and badness(p.grad) == NAN for p in model.parameters())


# --- the optimizer: settings that are not finite, and weights that explode ------------------------

_SETTINGS = frozenset(
    ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha", "betas", "rho", "lambd")
)
"""The numbers in a group that steps compute with; others may be infinite on purpose."""
EXPLODED = 100.0
"""The growth of the largest weight (of 1, if it is smaller) that is an explosion."""


def with_bad_setting(optimizer: Optimizer) -> Diagnosis | None:
    """Return the diagnosis of an optimizer whose next step has a number that is not finite.

    Sync: none; a setting that is a tensor on an accelerator is not read.
    """
    for name, value in _settings(optimizer):
        if not math.isfinite(value):
            of = type(optimizer).__name__
            text = (
                f"{name} of {of} is {value}, and so is every weight after this step: check what "
                f"sets it, such as a schedule past its end: optimizer.param_groups[0][{name!r}]"
            )
            return Diagnosis("data", tensor=f"{name} of {of}", cure=Cure("data", text))
    return None


def _settings(optimizer: Optimizer) -> Iterator[tuple[str, float]]:
    for group in _groups(optimizer):
        for name in _SETTINGS.intersection(group):
            value = group[name]
            values: Iterable[Any] = value if isinstance(value, tuple) else (value,)
            for each in values:
                if isinstance(each, Tensor) and each.device.type == "cpu" and each.numel() == 1:
                    yield name, float(each)
                elif isinstance(each, float):
                    yield name, each


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group for member in members(optimizer) for group in member.param_groups]


@dataclass(frozen=True)
class _Measured:
    step: int
    amax: float


class Growth:
    """Growth of the weights of each optimizer, measured before steps 1, 2, 4, 8 ...

    Attributes:
        was_explained: Whether :meth:`explain` has explained a step by it.
    """

    def __init__(self) -> None:
        self.was_explained = False
        self._before: weakref.WeakKeyDictionary[Optimizer, _Measured] = weakref.WeakKeyDictionary()

    def before_step(self, optimizer: Optimizer, step: int) -> None:
        """Measure the largest weight. Sync: one in steps 1, 2, 4, 8 ..., else none."""
        known = self._before.get(optimizer)
        if known is None or step >= 2 * known.step:
            amax = _largest(parameters(optimizer))
            if math.isfinite(amax):
                self._before[optimizer] = _Measured(step, amax)

    def explain(self, found: Diagnosis, step: int) -> Diagnosis | None:
        """Return the diagnosis of a step, changed if its weights have exploded.

        The cure is then a smaller learning rate or clipping: a clamp hides the explosion. A later
        step that follows from the same explosion has no diagnosis. Sync: one for each optimizer.
        """
        for optimizer, before in self._before.items():
            amax = _largest(parameters(optimizer))
            if not amax > EXPLODED * max(before.amax, 1.0):
                continue
            if self.was_explained:
                return None
            self.was_explained = True
            rates = [float(group["lr"]) for group in _groups(optimizer) if "lr" in group]
            name = type(optimizer).__name__
            note = (
                f"the run diverges: the largest weight of {name} grew from {number(before.amax)} "
                f"before step {before.step} to {number(amax)} before step {step}"
                + (f", at a learning rate of {number(max(rates))}" if rates else "")
            )
            text = (
                f"lower the learning rate of {name}, or clip the gradients before its step:\n"
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
            )
            notes = tuple(each for each in found.notes if each != HIDES)
            return replace(found, notes=(note, *notes), cure=Cure("code", text))
        return found


def _largest(weights: list[Tensor]) -> float:
    """Return the largest magnitude on this rank; NaN if there is a NaN, or if it is unknown."""
    with modes.unseen_by_modes(), torch.no_grad(), suppress(Exception):  # as of a subclass
        parts = [distributed.local_part(weight.detach()) for weight in weights]
        sizes = [part.abs().amax().float().cpu() for part in parts if part.numel()]
        return float(torch.stack(sizes).amax()) if sizes else math.nan
    return math.nan
