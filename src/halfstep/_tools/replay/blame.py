"""Blame: the origin of values that are not finite, either an op or a tensor from outside.

If all inputs of an op were finite, its bad outputs are blamed on the op. Otherwise the outputs
inherit the blame of the bad input. This traces each bad value to its origin, and leaves out
infinities that do no harm.

An infinity made on purpose, such as that of a mask, is not a fault; a NaN computed from it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._common.formats import dtype_name
from halfstep._common.module_names import without_wrappers
from halfstep._common.nested import tensors_in
from halfstep._gradients.gradients import parameters
from halfstep._pytorch import distributed, modes, storages
from halfstep._pytorch.dispatch import overload_of
from halfstep._pytorch.storages import ByMemory, is_made_of_others, parts_of
from halfstep._tools.measure import MINUS_INF, NAN, badness, bytes_of, extremes, is_finite, is_mask
from halfstep._tools.replay import ABSORBED, NO_END
from halfstep._tools.replay.observer import OpCall, OpKey, OpObserver
from halfstep._tools.replay.replay import Replayer, StepRun
from halfstep._tools.replay.variant import Variant
from halfstep._tools.trace.ops import OpPlace, by_name, makes_no_values, only_allocates
from halfstep._tools.trace.rows import Phase
from halfstep._tools.user_code import called_by_user

OUTSIDE = -1  # the number in the blame for a tensor that was bad before the replay
ELSEWHERE = -2  # the number in the blame for a tensor from another rank

_FILLS = {
    *("fill", "fill_", "full", "full_like", "new_full", "masked_fill", "masked_fill_"),
    *("index_fill", "index_fill_", "scalar_tensor", "constant_pad_nd", "where"),
}
_WAITS = ("_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")
_NOTHING_SENT = (*_WAITS, "c10d::recv_", "c10d::recv_any_source_")
_OVERWRITE = ("copy_", "fill_", "zero_")
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_SUMS = ("add", "add_", "sub", "sub_")
_SOFTMAXES = ("_softmax", "_log_softmax", "_safe_softmax")


@dataclass(frozen=True)
class Blame:
    """Origin of values that are not finite: an op, or a tensor and the op that read it first."""

    # The number of the op; OUTSIDE for a tensor from before the replay, ELSEWHERE for a tensor from
    # another rank.
    number: int
    op: str
    place: OpPlace
    phase: Phase
    reader: int  # number of the op, even if a tensor is to blame
    key: OpKey | None = None  # identity of the op across replays; None if there is no op
    of: OpKey | None = None  # in the backward pass, the key of the op whose gradient it computes
    dtype: torch.dtype | None = None  # of what the op made
    is_meant: bool = False  # whether the values are infinities made on purpose
    tensor: Tensor | None = None  # tensor from outside

    @property
    def where(self) -> tuple[str, str, Phase]:
        """The op, its module and the phase, which are the same in all replays."""
        return self.place.op or self.op, self.place.module, self.phase

    @property
    def forward_number(self) -> int:
        """The number of the op in the forward pass, or of the op whose gradient it computes."""
        return self.place.number if self.phase == "backward" else self.reader


def _of_call(call: OpCall, number: int) -> Blame:
    return Blame(number, call.name, call.place, call.phase, call.number, call.key, call.of)


_OF_NO_OP = Blame(OUTSIDE, "", OpPlace(), "backward", OUTSIDE)


class BlameTracker(OpObserver):
    """Observer that checks the outputs of every op and tracks the blame for non-finite values.

    Sync: one for every op.
    """

    def __init__(self) -> None:
        self._blames: ByMemory[Blame] = ByMemory()
        self.first: Blame | None = None  # harmful or not
        self._not_computed: list[str] = []
        self._opaque: list[str] = []
        self._losses: list[Blame] = []
        self._results: list[Blame] = []
        self._outputs: list[Blame] = []
        self._stepped: list[Blame] = []
        self._remaining: list[tuple[Tensor, Blame]] = []
        self._has_loss = self.has_end = False  # has_end: has something to judge by
        self._gradients: dict[int, tuple[Tensor, Blame]] = {}
        self._sent: Blame
        self._awaited: ByMemory[bool] = ByMemory()
        self._unwritten: ByMemory[bool] = ByMemory()  # memory that no op has written to

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Blame the outputs of an op on the op, or on its inputs."""
        if call.name == "lift_fresh" and self.first and badness(outputs[0]) == NAN:
            self._put(outputs[0], self.first)  # torch.tensor() of numbers read from bad tensors
        if makes_no_values(call.func):
            if only_allocates(call.func):
                for tensor in outputs:
                    self._unwritten.put(tensor, True)
            return
        for tensor in outputs:
            self._unwritten.drop(tensor)
        bad = [tensor for tensor in outputs if not self._check(tensor)]
        if not bad:
            return
        blame = self._blame(call, bad)
        if blame.reader == call.number:
            self.found(call, blame, bad)
        if self.first is None and not blame.is_meant:
            self.first = blame
        for tensor in bad:
            self._put(tensor, blame)

    def found(self, call: OpCall, blame: Blame, bad: list[Tensor]) -> None:
        """Handle an op that is newly blamed; do nothing by default."""

    def before_collective(self, call: OpCall) -> None:
        """Blame a bad result on the bad tensors that this rank sends, or else on another rank."""
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
        parts = self._seen(loss, "a loss")
        # A loss inside torch.func.grad does not count; the results of its gradients do.
        self._has_loss |= parts is not None and not modes.is_inside_functorch(loss)
        self._losses += self._blames_of(parts or [])

    def see_output(self, output: Tensor) -> None:
        """Note a bad output. It counts if there is no loss and no bad result."""
        blames = self._blames_of(parts_of(output) or [])
        self._outputs += [blame for blame in blames if not blame.is_meant]

    def see_result(self, result: object) -> None:
        """Note a bad result. It counts if there is no loss."""
        if isinstance(result, Tensor):
            blames = self._blames_of(self._seen(result, "a result") or [])
            self._results += [blame for blame in blames if not blame.is_meant]
        elif (is_good := _is_finite_number(result)) is not None:
            self.has_end = True
            self._results += [] if is_good else [self.first or _OF_NO_OP]

    def see_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        for blame in self._blames_of(self._seen(gradient, "a gradient") or []):
            self._gradients.setdefault(id(leaf), (leaf, blame))

    def see_step(self, optimizer: Optimizer) -> None:
        """Note bad weights after a step. They count if the losses and gradients are finite."""
        self.has_end = True
        for weight in parameters(optimizer):
            self._stepped += self._blames_of(parts_of(weight.detach()) or [])

    def see_remaining(self, leaf: Tensor, gradient: Tensor, *, is_new: bool) -> None:
        """Note a bad gradient. One from before the step counts if nothing else is bad."""
        self.has_end |= is_new
        for blame in self._blames_of(parts_of(gradient) or []):
            if blame.number == OUTSIDE:
                self._remaining.append((leaf, blame))
            else:
                self._gradients.setdefault(id(leaf), (leaf, blame))

    def _seen(self, tensor: Tensor, what: str) -> list[Tensor] | None:
        """Return the parts of a loss, result or gradient; note if its values cannot be read."""
        parts = parts_of(tensor)
        if parts is None:
            is_opaque = is_made_of_others(type(tensor))
            text = f"{what} of class {type(tensor).__name__} on {tensor.device}"
            (self._opaque if is_opaque else self._not_computed).append(text)
        self.has_end = True
        return parts

    @property
    def not_seen(self) -> tuple[str, ...]:
        """Unreadable results that may be bad, such as "a loss of class FakeTensor on cpu"."""
        # If no op was bad, wrapper tensors are finite too, since the ops on their parts were seen.
        opaque = [] if self.first is None else self._opaque
        return tuple(dict.fromkeys((*self._not_computed, *opaque)))

    def _blames_of(self, parts: list[Tensor]) -> list[Blame]:
        bad = [part for part in parts if not is_finite(part)]
        return [self._blames.get(part) or self._outside(part, None) for part in bad]

    @property
    def is_loss_bad(self) -> bool:
        """Whether a loss is not finite."""
        return bool(self._losses)

    is_settled = is_loss_bad

    @property
    def is_swallowed(self) -> bool:
        """Whether a module returned inf or NaN but the step, which has no loss, ends finite."""
        is_judged_by_outputs = not (self._has_loss or self._gradients or self._results)
        return is_judged_by_outputs and bool(self._outputs) and self.has_end

    @property
    def bad_leaves(self) -> list[Tensor]:
        """The leaves whose gradients are not finite."""
        return [leaf for leaf, _ in self._gradients.values() or self._remaining]

    def root(self, *, has_failed: bool = False, is_kept: bool = False) -> Blame | None:
        """Return the blame for a loss, or else for a gradient; without a loss, for a result.

        The results of kept calls, such as buffers, count with a loss too.
        If the step failed before any of these, return the blame for the first bad op.
        """
        ends = self._losses or [blame for _, blame in self._gradients.values()]
        if not self._has_loss:
            ends = ends or self._results or self._outputs
        elif is_kept:
            ends = ends or self._results
        if not ends and has_failed:
            return self.first
        # Kept calls begin without gradients, so those that remain are of the pass of the loop.
        ends = ends or self._stepped or [blame for _, blame in self._remaining if not is_kept]
        # Prefer ops of this rank to tensors received from others.
        ends = [blame for blame in ends if blame.number != ELSEWHERE] or ends
        return min(ends, key=lambda blame: blame.number, default=None)

    # --- origins ----------------------------------------------------------------------------------

    def _blame(self, call: OpCall, bad: list[Tensor]) -> Blame:
        own = replace(_of_call(call, call.number), dtype=bad[0].dtype)
        causes: list[Blame] = []
        worst: dict[Blame, int] = {}
        # Of memory that no op has written to, a backward pass may need no more than the shape.
        written = [tensor for tensor in call.given if tensor not in self._unwritten]
        is_read = any(badness(tensor) is not None for tensor in written)
        for tensor in written if is_read else call.given:
            values = self._as_read(call, tensor)
            how_bad = None if values is None else badness(values)
            if how_bad is None:
                continue
            cause = self._blames.get(tensor) or self._outside(tensor, call, values)
            if how_bad == NAN and cause.op == "scalar_tensor":
                continue  # a constant inside a function such as logdet, returned by its ``where``
            causes.append(cause)
            worst[cause] = max(worst.get(cause, 0), how_bad)
        if not causes:
            if self.first is not None and bad_number(call) is not None:
                return self.first  # number was read from a bad tensor, as by item()
            numbers = (v for v in (*call.args, *call.kwargs.values()) if isinstance(v, float))
            return replace(own, is_meant=call.name in _FILLS and any(map(math.isinf, numbers)))
        makes_nan = max(worst.values()) < NAN and any(badness(t) == NAN for t in bad)
        is_sum = any(cause.op in _SUMS and cause.number != OUTSIDE for cause in causes)
        is_masked = call.name in _SOFTMAXES and max(worst.values()) == MINUS_INF
        # A softmax of a fully masked row is to blame itself, unless a sum of masks overflowed.
        if makes_nan and is_masked and not is_sum:
            return own
        real = [cause for cause in causes if not cause.is_meant]
        if real:
            # NaN and inf spread; -inf alone may come from a mask.
            return min(real, key=lambda cause: (-worst[cause], cause.reader))
        return own if makes_nan else min(causes, key=lambda cause: cause.number)

    def _as_read(self, call: OpCall, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor from before the op; None if the result ignores them."""
        if not any(tensor is written for written in call.written):
            return tensor
        if call.name in _BATCH_NORMS:
            given = by_name(call.func, call.args, call.kwargs)
            if given.get("training", True):
                return None  # running statistics do not affect the result
        if call.name in _OVERWRITE or "out" in overload_of(call.func):
            return None
        if tensor in self._blames:  # an earlier op of the step made it bad
            return tensor
        return None if self.undo.was_made(tensor) else self.undo.before(tensor)

    def _outside(self, tensor: Tensor, call: OpCall | None, values: Tensor | None = None) -> Blame:
        is_meant = is_mask(tensor if values is None else values)
        if call is None:
            blame = _OF_NO_OP
        else:
            if call.name == "copy_" and call.written[0] in self._awaited:
                received = self._blames.get(call.written[0])
                if received is not None:
                    return received  # values come from a buffer of the process group
            blame = _of_call(call, OUTSIDE)
        return replace(blame, is_meant=is_meant, tensor=tensor)

    # --- state ------------------------------------------------------------------------------------

    def _check(self, tensor: Tensor) -> bool:
        """Return whether all values of a tensor are finite; if so, drop its old blame."""
        found = extremes(tensor)
        if found is None:
            return True
        if not all(map(math.isfinite, found)):
            return False
        if tensor in self._blames and _is_all_of_its_memory(tensor):
            self._blames.drop(tensor)
        return True

    def _put(self, tensor: Tensor, blame: Blame) -> None:
        known = self._blames.get(tensor)
        if known is None or _is_all_of_its_memory(tensor) or blame.number < known.number:
            self._blames.put(tensor, blame)


def _is_finite_number(value: object) -> bool | None:
    """Return whether a float or a float array is finite; None for other values."""
    if isinstance(value, float):
        return math.isfinite(value)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.kind != "f":
        return None
    return bool(numpy.isfinite(value).all())


def _sent_by(call: OpCall) -> list[Tensor]:
    """Return the tensors that a collective sends, without its uninitialized output buffers."""
    if call.name in _NOTHING_SENT:
        return []
    given = by_name(call.func, call.args, call.kwargs)
    return list(tensors_in([value for name, value in given.items() if "output" not in name]))


def bad_number(call: OpCall) -> float | None:
    """Return a number among the arguments of an op that is NaN, or inf and not for a mask."""
    numbers = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, float)]
    is_trained = any(tensor.requires_grad for tensor in call.given)
    is_meant = not is_trained or call.name.rstrip("_") not in ("add", "mul", "sub")
    return next((v for v in numbers if math.isnan(v) or (math.isinf(v) and not is_meant)), None)


def _is_all_of_its_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    return bytes_of(tensor) >= tensor.untyped_storage().nbytes()


# --- the search -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """Result of a replay that searches for the op to blame."""

    run: StepRun
    blame: Blame | None  # blame; None if the step is finite
    ends: tuple[str, ...]  # "loss", or the names of the parameters with bad gradients
    not_seen: tuple[str, ...]  # results that could not be checked
    first: Blame | None
    is_scaling: bool  # whether the op to blame multiplies the loss by the scale

    @property
    def is_finite(self) -> bool:
        """Whether the replay was completed, was fully checked and had no bad value."""
        return self.blame is None and self.run.error is None and not self.not_seen


def scan(
    replayer: Replayer,
    variant: Variant,
    around: AbstractContextManager[object] | None = None,
    tracker: BlameTracker | None = None,
) -> Scan:
    """Replay the step, inside ``around`` if given, and find the op to blame."""
    tracker = tracker or BlameTracker()
    with replayer.run(variant, tracker, around) as run:
        if run.error is None and not tracker.has_end:
            replayer.notes.append(NO_END)
        blame = tracker.root(
            has_failed=run.error is not None or not tracker.has_end, is_kept=replayer.is_kept
        )
        if tracker.is_swallowed:
            replayer.notes.append(ABSORBED)
        name_of = names_in(replayer.model)
        gradients = tuple(name_of(leaf) or name_in_code(leaf) for leaf in tracker.bad_leaves)
        return Scan(
            run=run,
            blame=blame,
            ends=("loss",) if tracker.is_loss_bad else gradients,
            not_seen=tracker.not_seen,
            first=tracker.first,
            is_scaling=blame is not None and any(blame.number in ops for ops in run.scaling),
        )


# --- names ----------------------------------------------------------------------------------------


def name_in_code(tensor: Tensor) -> str:
    """Return the name of a tensor in the user's code, or a description."""
    shape = ", ".join(map(str, tensor.shape))
    return called_by_user(tensor) or f"a {dtype_name(tensor.dtype)}[{shape}] without a name"


def names_in(model: nn.Module | None) -> Callable[[Tensor], str]:
    """Return a function that names parameters, buffers, their views and their gradients."""
    if model is None:
        return lambda _: ""
    before = _names_by_memory(model)

    def name_of(tensor: Tensor) -> str:
        key, _ = _memory(tensor)
        # FSDP swaps in gathered parameters while a module runs.
        _, found = before.get(key) or _names_by_memory(model).get(key) or (None, {})
        return found.get(_offset(tensor), "") if len(found) > 1 else "".join(found.values())

    return name_of


def _names_by_memory(model: nn.Module) -> dict[int, tuple[object, dict[int, str]]]:
    """Return a dictionary from a memory to a reference to it and the tensor names by offset."""
    names: dict[int, tuple[object, dict[int, str]]] = {}
    gradients = [(f"{name}.grad", param.grad) for name, param in model.named_parameters()]
    for name, tensor in (*model.named_buffers(), *model.named_parameters(), *gradients):
        if tensor is not None:
            key, reference = _memory(tensor)
            _, found = names.setdefault(key, (reference, {}))
            found[_offset(tensor)] = without_wrappers(name)
    return names


def _offset(tensor: Tensor) -> int:
    """Return the storage offset of a tensor; several gradients may share one buffer."""
    if tensor.layout is not torch.strided:
        return 0
    return int(distributed.local_part(tensor.detach()).storage_offset())


def _memory(tensor: Tensor) -> tuple[int, object]:
    """Return an id for the memory of a tensor, and an object that prevents reuse of the id."""
    memory = storages.memory_of(distributed.local_part(tensor.detach()))
    return (id(tensor), tensor) if memory is None else (int(memory.cdata), memory)
