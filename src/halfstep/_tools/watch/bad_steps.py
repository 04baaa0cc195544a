"""Signs of a bad step: values that are not finite, and unexpected skips."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from halfstep._pytorch import amp, distributed, modes
from halfstep._scaler import Outcome, Reason
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


def values_of(losses: Iterable[Tensor]) -> list[float]:
    """Return losses; of one with several values, 0 or NaN if it is bad. Sync: one for each."""
    with modes.unseen_by_modes(), torch.no_grad():
        return [
            float(each.detach())
            if type(each) is Tensor and each.numel() == 1
            else (0.0 if are_finite([each]) else math.nan)
            for each in losses
        ]


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite magnitude on this rank; 0 if it is unknown. Sync: one."""
    with modes.unseen_by_modes(), torch.no_grad(), suppress(Exception):  # as of a subclass
        parts = [p for t in tensors if (p := distributed.local_part(t.detach())).numel()]
        sizes = [part.abs().nan_to_num(0, 0, 0).amax().cpu().double() for part in parts]
        return float(torch.stack(sizes).amax()) if sizes else 0.0
    return 0.0


def have_finite_values(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors, read together, are finite. Sync: one for each device."""
    with modes.unseen_by_modes(), torch.no_grad():
        found = [tensor.detach() for tensor in tensors]
        dense = [tensor for tensor in found if _is_plain(tensor)]
        norms = _values_of(amp.norms_of_each(dense)) if dense else []
        # A norm may overflow although all entries are finite, and other layouts may have no norm:
        # check the entries of these tensors.
        doubtful = [t for t, norm in zip(dense, norms, strict=True) if not math.isfinite(norm)]
        return are_finite([*doubtful, *(t for t in found if not _is_plain(t))])


def _values_of(norms: Sequence[Tensor]) -> list[float]:
    on_each: dict[torch.device, list[Tensor]] = {}
    for norm in norms:
        on_each.setdefault(norm.device, []).append(norm.float())
    values = {device: iter(torch.stack(some).tolist()) for device, some in on_each.items()}
    return [next(values[norm.device]) for norm in norms]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_floating_point()


def has_nan(model: nn.Module) -> bool:
    """Return whether a gradient of a model contains a NaN. Sync: one for each gradient."""
    with modes.unseen_by_modes():
        return any(p.grad is not None and badness(p.grad) == NAN for p in model.parameters())
