"""Blame for values that are not finite, and the search for it: an op, or a tensor bad before it.

The outputs of an op are blamed on the op if all its inputs were finite. Otherwise they have the
blame of the bad input. So a bad value is traced back to its origin, and infinities that do no harm
are not blamed.

An infinity made on purpose, such as that of a mask, is not a fault; a NaN made from it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.modules import without_wrappers
from halfstep._common.nested import tensors_in
from halfstep._diagnose.observer import OpCall, OpKey, OpObserver
from halfstep._diagnose.replay import Replayer, StepRun
from halfstep._diagnose.variant import Variant
from halfstep._numerics.measure import MINUS_INF, NAN, badness, extremes, is_finite, is_mask
from halfstep._pytorch.dispatch import overload_of
from halfstep._pytorch.storages import ByMemory
from halfstep._trace.ops import by_name, makes_no_values
from halfstep._trace.places import OpPlace
from halfstep._trace.rows import Phase

OUTSIDE = -1
"""The number of a tensor that was bad before the replay."""
ELSEWHERE = -2
"""The number of a tensor that another rank has sent."""

_FILLS = (
    "fill",
    "fill_",
    "full",
    "full_like",
    "new_full",
    "masked_fill",
    "masked_fill_",
    "index_fill",
    "index_fill_",
    "scalar_tensor",
    "constant_pad_nd",
    "where",
)
_WAITS = ("_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")
_NOTHING_SENT = (*_WAITS, "c10d::recv_", "c10d::recv_any_source_")
_OVERWRITE = ("copy_", "fill_", "zero_")
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_SUMS = ("add", "add_", "sub", "sub_")
_SOFTMAXES = ("_softmax", "_log_softmax", "_safe_softmax")


GradientPlace = tuple[str, int, str | None, str]
"""Module, call, the op that the rule was looked up for, and the op: the same in any dtype."""


@dataclass(frozen=True)
class Blame:
    """Origin of values that are not finite: an op, or a tensor and the op that read it first.

    Attributes:
        number: The number of the op, ``OUTSIDE`` for a tensor from before the replay,
            ``ELSEWHERE`` for a tensor from another rank.
        reader: The number of the op in any case.
        key: Identifies the op in other replays; None if there is no op.
        of: In the backward pass, the key of the op whose gradient it computes.
        is_meant: Whether the values are infinities made on purpose.
        tensor: The tensor from outside.
    """

    number: int
    op: str
    place: OpPlace
    phase: Phase
    reader: int
    key: OpKey | None = None
    of: OpKey | None = None
    is_meant: bool = False
    tensor: Tensor | None = None

    @property
    def where(self) -> tuple[str, str, Phase]:
        """The op, its module and the phase: the same in other replays."""
        return self.place.op or self.op, self.place.module, self.phase


def _of_call(call: OpCall, number: int) -> Blame:
    return Blame(number, call.name, call.place, call.phase, call.number, call.key, call.of)


class BlameTracker(OpObserver):
    """Observer that checks the outputs of every op and tracks the blame for bad values.

    Attributes:
        has_end: Whether there was a loss or a result by which the step is judged.
        gradients: The dtypes and largest finite magnitudes of the outputs of ops of the backward
            pass, by their places.

    Sync: one for every op.
    """

    def __init__(self) -> None:
        self._blames: ByMemory[Blame] = ByMemory()
        self.gradients: dict[GradientPlace, tuple[torch.dtype, float]] = {}
        self._first: Blame | None = None
        self._losses: list[Blame] = []
        self._results: list[Blame] = []
        self._has_loss = self.has_end = False
        self._gradients: dict[int, tuple[Tensor, Blame]] = {}
        self._sent: Blame
        self._awaited: ByMemory[bool] = ByMemory()

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Blame the outputs of an op on the op, or on its inputs."""
        if makes_no_values(call.func):
            return
        bad = [tensor for tensor in outputs if not self._check(tensor, call)]
        if not bad:
            return
        blame = self._blame(call, bad)
        if blame.reader == call.number:
            self.found(call, blame, bad)
        if self._first is None and not blame.is_meant:
            self._first = blame
        for tensor in bad:
            self._put(tensor, blame)

    def found(self, call: OpCall, blame: Blame, bad: list[Tensor]) -> None:
        """Handle an op that is blamed for the first time; do nothing by default."""

    def before_collective(self, call: OpCall) -> None:
        """Blame the result on bad tensors that this rank sends, otherwise on another rank."""
        own = [tensor for tensor in _sent_by(call) if badness(tensor) is not None]
        causes = [self._blames.get(tensor) or self._outside(tensor, call) for tensor in own]
        other = _of_call(call, ELSEWHERE)
        self._sent = min(causes, key=lambda blame: blame.number, default=other)

    def after_collective(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Note the blame for the outputs, in case they turn out to be bad."""
        if call.name not in _WAITS:
            for tensor in outputs:
                self._put(tensor, self._sent)
                self._awaited.put(tensor, True)

    def see_loss(self, loss: Tensor) -> None:
        """Note a loss that is not finite."""
        self._has_loss = self.has_end = True
        if not is_finite(loss):
            self._losses.append(self._blames.get(loss) or self._outside(loss, None))

    def see_result(self, result: Tensor) -> None:
        """Note a result that is not finite. It counts if there is no loss."""
        self.has_end = True
        if not is_finite(result):
            blame = self._blames.get(result) or self._outside(result, None)
            if not blame.is_meant:
                self._results.append(blame)

    def see_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        """Note a gradient that is not finite."""
        if not is_finite(gradient):
            blame = self._blames.get(gradient) or self._outside(gradient, None)
            self._gradients.setdefault(id(leaf), (leaf, blame))

    @property
    def is_loss_bad(self) -> bool:
        """Whether a loss is not finite."""
        return bool(self._losses)

    @property
    def bad_leaves(self) -> list[Tensor]:
        """The leaves whose gradients are not finite."""
        return [leaf for leaf, _ in self._gradients.values()]

    def root(self, *, has_failed: bool = False) -> Blame | None:
        """Return the blame for a loss or, if all losses are finite, for a gradient, or None.

        If the step has failed before there was any of these, return that of the first bad op.
        """
        ends = self._losses or [blame for _, blame in self._gradients.values()]
        if not self._has_loss:
            ends = self._results
        if not ends and has_failed:
            return self._first
        # The ops of this rank say more than the tensors that it received.
        ends = [blame for blame in ends if blame.number != ELSEWHERE] or ends
        return min(ends, key=lambda blame: blame.number, default=None)

    # --- origins ----------------------------------------------------------------------------------

    def _blame(self, call: OpCall, bad: list[Tensor]) -> Blame:
        own = _of_call(call, call.number)
        causes: list[Blame] = []
        worst: dict[Blame, int] = {}
        for tensor in call.given:
            values = self._as_read(call, tensor)
            how_bad = None if values is None else badness(values)
            if how_bad is None:
                continue
            cause = self._blames.get(tensor) or self._outside(tensor, call, values)
            causes.append(cause)
            worst[cause] = max(worst.get(cause, 0), how_bad)
        if not causes:
            return replace(own, is_meant=_is_fill_with_inf(call))
        makes_nan = max(worst.values()) < NAN and any(bool(t.isnan().any()) for t in bad)
        is_sum = any(cause.op in _SUMS for cause in causes)
        is_masked = call.name in _SOFTMAXES and max(worst.values()) == MINUS_INF
        if makes_nan and is_masked and not is_sum:  # masks whose sum overflows: the sum is to blame
            return own  # of a row that is fully masked, whatever the mask
        real = [cause for cause in causes if not cause.is_meant]
        if real:
            # NaN and inf spread; -inf alone may come from a mask.
            return min(real, key=lambda cause: (-worst[cause], cause.number))
        return own if makes_nan else min(causes, key=lambda cause: cause.number)

    def _as_read(self, call: OpCall, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor as an op read them; None if the result ignores them."""
        if not any(tensor is written for written in call.written):
            return tensor
        if call.name in _BATCH_NORMS:
            given = by_name(call.func, call.args, call.kwargs)
            if given.get("training", True):
                return None  # running statistics, on which the result does not depend
        if call.name in _OVERWRITE or "out" in overload_of(call.func):
            return None
        if self.undo.was_made(tensor):
            return tensor if tensor in self._blames else None
        return self.undo.before(tensor)

    def _outside(self, tensor: Tensor, call: OpCall | None, values: Tensor | None = None) -> Blame:
        is_meant = is_mask(tensor if values is None else values)
        if call is None:
            blame = Blame(OUTSIDE, "", OpPlace(), "backward", OUTSIDE)
        else:
            if call.name == "copy_" and call.written[0] in self._awaited:
                received = self._blames.get(call.written[0])
                if received is not None:
                    return received  # the values came through memory of the process group
            blame = _of_call(call, OUTSIDE)
        return replace(blame, is_meant=is_meant, tensor=tensor)

    # --- state ------------------------------------------------------------------------------------

    def _check(self, tensor: Tensor, call: OpCall) -> bool:
        """Return whether all values of a tensor are finite; if so, forget its old blame."""
        found = extremes(tensor)
        if found is None:
            return True
        amax = max(map(abs, found))
        if call.phase == "backward":
            self._note_gradient(tensor, call, amax)
        if not all(map(math.isfinite, found)):
            return False
        if tensor in self._blames and _is_all_of_its_memory(tensor):
            self._blames.drop(tensor)
        return True

    def _note_gradient(self, tensor: Tensor, call: OpCall, amax: float) -> None:
        place = (call.place.module, call.place.call, call.place.op, call.name)
        before = self.gradients.get(place, (tensor.dtype, 0.0))[1]
        self.gradients[place] = (tensor.dtype, max(before, amax) if math.isfinite(amax) else before)

    def _put(self, tensor: Tensor, blame: Blame) -> None:
        known = self._blames.get(tensor)
        if known is None or _is_all_of_its_memory(tensor) or blame.number < known.number:
            self._blames.put(tensor, blame)


def _sent_by(call: OpCall) -> list[Tensor]:
    """Return the tensors that a collective sends; its output buffers need not have values."""
    if call.name in _NOTHING_SENT:
        return []
    given = by_name(call.func, call.args, call.kwargs)
    return list(tensors_in([value for name, value in given.items() if "output" not in name]))


def _is_fill_with_inf(call: OpCall) -> bool:
    values: list[Any] = [*call.args, *call.kwargs.values()]
    return call.name in _FILLS and any(isinstance(v, float) and math.isinf(v) for v in values)


def _is_all_of_its_memory(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


# --- the search -----------------------------------------------------------------------------------

NO_END = (
    "the step was judged by its ops alone: it called no backward and returned no tensor (a loss in "
    "an object of your own is not seen)"
)


@dataclass(frozen=True)
class Scan:
    """Result of a replay that looks for the op to blame.

    Attributes:
        run: The run of the step.
        blame: The blame, None if the step is finite.
        ends: What is not finite at the end: the loss, or gradients of parameters.
        is_scaling: Whether the op to blame multiplies the loss by the scale.
        gradients: The dtypes and largest magnitudes in the backward pass.
    """

    run: StepRun
    blame: Blame | None
    ends: tuple[str, ...]
    is_scaling: bool
    gradients: Mapping[GradientPlace, tuple[torch.dtype, float]]

    @property
    def is_finite(self) -> bool:
        """Whether the replay came to its end, and nothing was bad."""
        return self.blame is None and self.run.error is None


def scan(
    replayer: Replayer, variant: Variant, around: AbstractContextManager[object] | None = None
) -> Scan:
    """Replay the step, in a context if one is given, and find the op to blame."""
    tracker = BlameTracker()
    with replayer.run(variant, tracker, around) as run:
        if run.error is None and not tracker.has_end:
            replayer.notes.append(NO_END)
        blame = tracker.root(has_failed=run.error is not None or not tracker.has_end)
        gradients = _names_of(tracker.bad_leaves, replayer.model)
        return Scan(
            run=run,
            blame=blame,
            ends=("loss",) if tracker.is_loss_bad else gradients,
            is_scaling=blame is not None and any(blame.number in ops for ops in run.scaling),
            gradients=tracker.gradients,
        )


def _names_of(leaves: list[Tensor], model: nn.Module | None) -> tuple[str, ...]:
    """Return the names of parameters, and the shapes of other leaves."""
    named = () if model is None else model.named_parameters()
    known = {id(param): without_wrappers(name) for name, param in named}
    return tuple(known.get(id(leaf), f"a leaf of shape {tuple(leaf.shape)}") for leaf in leaves)
