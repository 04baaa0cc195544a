"""Inspection of a bad op: its values, its line, and its result in a wider dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._common.formats import dtype_name
from halfstep._common.nested import map_plain, tensors_in
from halfstep._common.numbers import listed
from halfstep._pytorch.devices import has_float64, in_float64
from halfstep._pytorch.dispatch import schema_of
from halfstep._tools.diagnose.diagnosis import A_NUMBER, BadOp, Operand, short_error
from halfstep._tools.diagnose.edits import row_name
from halfstep._tools.diagnose.user_calls import (
    MOST_NAMED,
    UserCall,
    UserCalls,
    call_of,
    named_entries,
    named_rows,
)
from halfstep._tools.measure import ends_of, float_values
from halfstep._tools.replay.blame import (
    OUTSIDE,
    Blame,
    BlameTracker,
    bad_number,
    name_in_code,
    names_in,
)
from halfstep._tools.replay.observer import OpCall, OpObserver
from halfstep._tools.replay.replay import Replayer
from halfstep._tools.replay.variant import Variant
from halfstep._tools.trace.ops import by_name
from halfstep._tools.user_code import Place, is_of_batch, is_part_of, user_line, user_place

MOST_INSPECTED = 64
"""The largest number of bad ops that are inspected; the one to blame is among the first."""

# The third argument of these ops requests float32 results from float16; it is invalid for float64.
_HALF_TO_FLOAT = ("_softmax", "_log_softmax")
# The ops whose result in float32 may fit while the sum inside does not.
_MEANS = {"mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
# Buffers saved by the forward pass, with a layout that depends on the dtype. An op that runs in
# another dtype would read out of bounds.
_OPAQUE = {"workspace", "reserve", "reserveSpace", "weight_buf"}


class OpInspection(OpObserver):
    """Observer of the op that is to blame, and of the op whose gradient it computes."""

    def __init__(self, blame: Blame, name_of: Callable[[Tensor], str]) -> None:
        self._blame, self._name_of = blame, name_of
        self.bad = described(blame)
        self.has_seen = blame.key is None  # whether the op ran
        self.tensor: str | None = None  # name of the tensor from outside, or of a number
        # Call that ran the op, or the op whose gradient it computes.
        self.call: UserCall | None = None
        self.notes: list[str] = []
        self.is_of_batch = False  # whether the tensor from outside was given to a module or a loss

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        return self.has_seen and self._blame.phase == "forward"

    def before(self, call: OpCall) -> None:
        """Describe the inputs of the op, and compute it in float64."""
        tensor = self._blame.tensor
        if tensor is not None and call.key in (self._blame.of, self._blame.key):
            self.is_of_batch |= is_of_batch(tensor)
        if call.key == self._blame.of:
            self.bad = replace(self.bad, forward_op=call.name, forward_line=user_line())
        if call.key == self._blame.key:
            self.has_seen = True
            inputs = tuple(operand(t, self._name_of(t)) for t in call.given if _is_shown(t))
            line = user_line()
            name = call.name if line and self.bad.phase == "backward" else self.bad.name
            self.bad = replace(self.bad, name=name, line=line, inputs=inputs, needs=_needs(call))
            if tensor is not None:
                self.tensor = name_of_bad(call, self.bad.inputs, tensor)
            elif not any(each.nan or each.inf for each in inputs):
                number = bad_number(call)
                self.tensor = None if number is None else f"{A_NUMBER}{number}"
            self.notes = _ignored(call)

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        if call.key == self._blame.key:
            bad = (t for t in outputs if t.is_floating_point() and not bool(t.isfinite().all()))
            if (output := next(bad, None)) is not None:
                described, limit = operand(output, self._name_of(output)), torch.finfo(output.dtype)
                self.bad = replace(self.bad, output=described, limit=limit.max)
                gives = f"the cast gives {'inf' if described.inf else 'NaN'}"
                entries = bad_entries(output, call.given[0]) if call.name == "_to_copy" else ""
                self.notes += [gives + entries] * bool(entries)
                self.notes += [*_mean_in_place(call, self.bad), *_too_short(call)]


def inspect(replayer: Replayer, blame: Blame, scale: float | None) -> OpInspection:
    inspection = OpInspection(blame, names_in(replayer.model))
    calls = UserCalls(replayer.num_ops)
    with replayer.run(Variant(scale=scale), inspection, calls.active()) as run:
        inspection.call = call_of(calls, blame)
        if not inspection.has_seen:
            error = f" ({short_error(run.error)})" if run.error else ""
            replayer.notes.append(f"a second replay did not reach this op{error}")
        replayer.notes += inspection.notes
        return inspection


def _ignored(call: OpCall) -> list[str]:
    """Return a remark if a loss has no target to average over."""
    if not call.name.startswith("nll_loss"):
        return []
    given = by_name(call.func, call.args, call.kwargs)
    target, index, weight = given["target"], given.get("ignore_index", -100), given.get("weight")
    counted, size = target[target != index], target.numel()
    if not counted.numel():
        return [f"the targets ({size}) are all {index}, which is ignore_index: nothing is averaged"]
    is_of_none = weight is not None and not bool(weight[counted].any())
    return [f"the weights of the classes of all targets ({size}) are 0"] * is_of_none


def _mean_in_place(call: OpCall, bad: BadOp) -> list[str]:
    """Return a remark if a sum of all values overflowed, with their mean."""
    given = by_name(call.func, call.args, call.kwargs)
    is_sum = call.name == "sum" or given.get("reduction") == 2  # Reduction::Sum of ATen
    if bad.needs is None or bad.output is None or bad.output.shape or not (is_sum and bad.excess):
        return []
    size = given.get("target", call.given[0]).numel()
    said = f"it adds {size:,} values, with a mean of {bad.needs / size:.4g}"
    return [f"{said}; if no later line divides the sum, take the mean in its place"]


def _too_short(call: OpCall) -> list[str]:
    """Return a remark on the rows of a batch whose labels do not fit their frames in a CTC loss."""
    given = by_name(call.func, call.args, call.kwargs)
    if "ctc_loss" not in call.name or "target_lengths" not in given:
        return []
    lengths = (given["input_lengths"], given["target_lengths"])
    frames, sizes = (torch.as_tensor(each).reshape(-1).tolist() for each in lengths)
    labels = given["targets"]
    if labels.dim() == 1:
        rows = list(labels.split(sizes))
    else:
        rows = [row[:size] for row, size in zip(labels, sizes, strict=True)]
    # A blank stands between equal labels.
    needs = [len(row) + int((row[1:] == row[:-1]).sum()) for row in rows]
    short = [(n, num) for n, num in zip(needs, frames, strict=True) if n > num][:MOST_NAMED]
    if not short:
        return []
    which = named_rows(torch.tensor(needs) > torch.tensor(frames)) or "each row"
    needed, there = (listed([*map(str, each)]) for each in zip(*short, strict=True))
    return [
        f"the loss of {which} is inf: the labels need {needed} frames, and there are {there}; "
        "leave these rows out, or give them a loss of 0 by zero_infinity=True"
    ]


def named_by(call: UserCall | None, bad: BadOp) -> BadOp:
    """Return a description that names the calling function instead of a ``where`` inside it."""
    if call is None or bad.name != "where":
        return bad
    return replace(bad, name=row_name(call.function))


def described(blame: Blame) -> BadOp:
    """Return the description of the op to blame, without lines and values."""
    place = blame.place
    return BadOp(
        op=blame.op,
        name=place.op or blame.op,
        module=place.module,
        call=place.call,
        phase=blame.phase,
        rule=place.rule,
        line=None,
        forward_op=None,
        forward_line=None,
        inputs=(),
        output=None,
        needs=None,
        limit=None,
    )


def _is_shown(tensor: Tensor) -> bool:
    """Return whether an operand is shown; masks and complex tensors are not."""
    return tensor.dtype is not torch.bool and not tensor.is_complex()


def name_of_bad(call: OpCall, inputs: tuple[Operand, ...], bad: Tensor) -> str:
    """Return the user's name of the bad tensor among the inputs of an op."""
    shown = filter(_is_shown, call.given)
    for tensor, read in zip(shown, inputs, strict=True):
        if is_part_of(tensor, bad) and (read.nan or read.inf):
            return read.name or name_in_code(tensor)
    return "a tensor without a name"


def bad_entries(tensor: Tensor, cast: Tensor | None = None) -> str:
    """Return " in row 3 of 32 (from 0)" for the entries of a tensor that are not finite.

    Rows or columns are left out if all are bad. Of inf in float16, the largest of the finite
    values in these columns follows, or of what a cast has read, as they may not have fitted it.
    Sync: several.
    """
    values = float_values(tensor)
    if values is None or values.shape != tensor.shape:
        return ""
    bad = ~values.isfinite()
    entries = named_entries(bad)
    text = f" in {entries}" if entries else ""
    is_overflow = bool(values.isinf().any()) and not bool(values.isnan().any())
    if values.dtype is torch.float16 and values.dim() == 2 and is_overflow:
        read = values if cast is None else cast.detach()
        finite = read.nan_to_num(0.0, 0.0, 0.0)[:, bad.any(0)]
        largest = float(finite.abs().max())
        end = f" (values there reach {largest:,.0f}, and float16 ends at 65,504: keep float32)"
        text += end if largest > _LARGE_IN_FLOAT16 else ""
    return text


_LARGE_IN_FLOAT16 = 2.0**12
"""The finite size from which on an inf beside it is likely to be a value that did not fit."""


def operand(tensor: Tensor, name: str) -> Operand:
    """Describe the values of a tensor. Sync: one or two."""
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    is_float = tensor.is_floating_point() or tensor.is_complex()
    values = float_values(tensor if is_float else in_float64(tensor.detach()))
    if values is None or not values.numel():
        return Operand(name, dtype, shape, None, None, 0, 0, 0)
    values = values.float() if values.element_size() == 1 else values
    finite = values[values.isfinite()]
    counted = (values.isnan(), values.isinf(), values == 0, values == -math.inf)
    counts = torch.stack([each.sum() for each in counted]).tolist()
    low, high = ends_of(finite) if finite.numel() else (None, None)
    return Operand(name, dtype, shape, low, high, *counts)


def _needs(call: OpCall) -> float | None:
    """Return the largest magnitude of the result of an op in float64, and of the sum in a mean.

    The sum overflows first. None if that is not finite, or the op is random or has no float64.
    """
    is_random = torch.Tag.nondeterministic_seeded in call.func.tags
    wide = None if is_random else in_wider(call, torch.float64)
    floats = [tensor for tensor in wide or () if tensor.is_floating_point()]
    sizes = [float(tensor.abs().amax()) if tensor.numel() else 0.0 for tensor in floats]
    if not sizes or not all(map(math.isfinite, sizes)):
        return None
    given, fits = call.given[0], max(sizes) <= torch.finfo(torch.float32).max
    if call.name in _MEANS and given.dtype is torch.float32 and fits:
        return max(sizes) * given.numel() / floats[0].numel()
    return max(sizes)


def in_wider(call: OpCall, dtype: torch.dtype) -> list[Tensor] | None:
    """Run an op on copies of its inputs in a wider dtype; return None if that is impossible.

    In float64 and on a device that has none, it runs on the CPU.
    """
    if any(argument.name in _OPAQUE for argument in schema_of(call.func).arguments):
        return None

    tensors = [*tensors_in([call.args, call.kwargs])]
    on_cpu = dtype is torch.float64 and not all(has_float64(tensor.device) for tensor in tensors)

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor):  # copied because the op may write to it
            is_float = value.is_floating_point()
            value = value.detach().cpu() if on_cpu else value.detach()
            return value.to(dtype, copy=True) if is_float else value.clone()
        return dtype if isinstance(value, torch.dtype) and value.is_floating_point else value

    args, kwargs = map_plain(widened, ([*call.args], call.kwargs))
    if call.name in _HALF_TO_FLOAT:
        args[2] = False
    try:
        return list(tensors_in([call.func(*args, **kwargs)]))
    except (RuntimeError, TypeError, NotImplementedError):  # no kernel for the dtype
        return None


class InspectingTracker(BlameTracker):
    """Blame tracker that inspects ops immediately if they may be to blame.

    If ``is_replay``, two kinds of op are left to another replay: ops that write to their inputs,
    and backward ops that read a bad tensor from outside (the call that received it has returned).
    """

    def __init__(self, model: nn.Module | None, *, is_replay: bool) -> None:
        super().__init__()
        self.inspected: dict[int, OpInspection] = {}  # by the number of the op
        self._is_replay = is_replay
        self._places: dict[int, tuple[str, Place | None]] = {}
        self._name_of = names_in(model)

    def before(self, call: OpCall) -> None:
        """Note the place of a forward op for use in its backward pass."""
        super().before(call)
        if call.phase != "backward":
            self._places[call.number] = (call.name, user_place())

    def found(self, call: OpCall, blame: Blame, bad: list[Tensor]) -> None:
        """Inspect an op that may be to blame."""
        is_from_before = blame.number == OUTSIDE and blame.of is not None
        is_left = self._is_replay and (bool(call.written) or is_from_before)
        if is_left or len(self.inspected) >= MOST_INSPECTED:
            return
        inspection = OpInspection(blame, self._name_of)
        inspection.before(call)
        inspection.after(call, bad)
        if call.written:  # the op has overwritten its inputs
            inspection.bad = replace(inspection.bad, needs=None)
        if blame.of is not None:
            op, place = self._places.get(call.place.number, (None, None))
            line = None if place is None else place.line
            inspection.bad = replace(inspection.bad, forward_op=op, forward_line=line)
        self.inspected[call.number] = inspection
