"""Inspection of ops in a replay: the values of one op, and the values that ops flush to zero.

Both compute an op in a wider dtype too, from the same inputs. Inputs that were flushed earlier
count for the op that flushed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.modules import without_wrappers
from halfstep._common.nested import map_plain, tensors_in
from halfstep._diagnose.blame import Blame
from halfstep._diagnose.diagnosis import BadOp, Flush, Line, Operand
from halfstep._diagnose.observer import OpCall, OpObserver
from halfstep._diagnose.replay import Replayer
from halfstep._diagnose.user_calls import UserCall, UserCalls, call_of
from halfstep._diagnose.user_code import called_by_user, is_of_batch, user_line
from halfstep._diagnose.variant import Variant
from halfstep._numerics.formats import FORMATS_BY_DTYPE, dtype_name
from halfstep._numerics.measure import float_values
from halfstep._pytorch import distributed, storages
from halfstep._pytorch.dispatch import schema_of
from halfstep._trace.ops import by_name, makes_no_values
from halfstep._trace.rows import Phase

# Their third argument asks for float32 results from float16; it is invalid for float64.
_HALF_TO_FLOAT = ("_softmax", "_log_softmax")
# Arguments with memory of the forward pass in a layout that depends on the dtype: an op of another
# dtype would read past its end.
_OPAQUE = {"workspace", "reserve", "reserveSpace", "weight_buf"}


class OpInspection(OpObserver):
    """Observer of the op that is to blame, and of the op whose gradient it computes.

    Attributes:
        bad: The description of the op.
        has_seen: Whether the op ran, if there is one.
        tensor: The name of the tensor from outside.
        call: The call of the user's code that ran the op, or the op whose gradient it computes.
        notes: Remarks about what the op was given.
        is_of_batch: Whether the tensor from outside was handed to a module or a loss.
    """

    def __init__(self, blame: Blame, name_of: Callable[[Tensor], str]) -> None:
        self._blame, self._name_of = blame, name_of
        self.bad = described(blame)
        self.has_seen = blame.key is None
        self.tensor: str | None = None
        self.call: UserCall | None = None
        self.notes: list[str] = []
        self.is_of_batch = False

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        """Whether the op has run."""
        return self.has_seen and self._blame.phase == "forward"

    def before(self, call: OpCall) -> None:
        """Describe the inputs of the op, and compute it in float64."""
        if call.key == self._blame.of:
            self.bad = replace(self.bad, forward_op=call.name, forward_line=user_line())
            self._note_batch()
        if call.key == self._blame.key:
            self.has_seen = True
            self.bad = replace(with_inputs(self.bad, call, self._name_of), needs=needs(call))
            if self._blame.tensor is not None:
                self.tensor = name_of_bad(call, self.bad.inputs, self._blame.tensor)
                self._note_batch()
            self.notes = _ignored(call)

    def _note_batch(self) -> None:
        tensor = self._blame.tensor
        self.is_of_batch |= tensor is not None and is_of_batch(tensor)

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Describe its bad output."""
        if call.key == self._blame.key:
            bad = (t for t in outputs if t.is_floating_point() and not bool(t.isfinite().all()))
            output = next(bad, None)
            if output is not None:
                self.bad = with_output(self.bad, operand(output, self._name_of(output)))


def inspect(replayer: Replayer, blame: Blame, scale: float | None) -> OpInspection:
    """Replay the step and inspect the op to blame."""
    inspection = OpInspection(blame, names_in(replayer.model))
    calls = UserCalls(replayer.num_ops)
    with replayer.run(Variant(scale=scale), inspection, calls.active()) as run:
        inspection.call = call_of(calls, blame)
        if not inspection.has_seen:
            error = f" ({type(run.error).__name__}: {run.error})" if run.error else ""
            replayer.notes.append(f"a second replay did not reach this op{error}")
        replayer.notes += inspection.notes
        return inspection


def _ignored(call: OpCall) -> list[str]:
    """Return a remark if a loss has no target to average over."""
    if not call.name.startswith("nll_loss"):
        return []
    given = by_name(call.func, call.args, call.kwargs)
    target, index = given.get("target"), given.get("ignore_index", -100)
    if target is None or not bool((target == index).all()):
        return []
    return [f"all {target.numel()} targets are {index}, which is ignore_index: nothing is averaged"]


def described(blame: Blame) -> BadOp:
    """Return the description of the op to blame, still without its lines and values."""
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


def with_inputs(bad: BadOp, call: OpCall, name_of: Callable[[Tensor], str]) -> BadOp:
    """Return a description with the inputs of a call, and the line of the user's that runs."""
    inputs = tuple(operand(t, name_of(t)) for t in call.given if _is_shown(t))
    return replace(bad, line=user_line(), inputs=inputs)


def _is_shown(tensor: Tensor) -> bool:
    """Return whether a tensor is described: not masks."""
    return tensor.dtype is not torch.bool and not tensor.is_complex()


def with_output(bad: BadOp, output: Operand) -> BadOp:
    """Return a description with an output, and the limit of its dtype."""
    return replace(bad, output=output, limit=torch.finfo(getattr(torch, output.dtype)).max)


def name_of_bad(call: OpCall, inputs: tuple[Operand, ...], bad: Tensor) -> str:
    """Return the user's name of the bad tensor among the inputs of an op."""
    shown = filter(_is_shown, call.given)
    for tensor, read in zip(shown, inputs, strict=True):
        if _memory(tensor)[0] == _memory(bad)[0] and (read.nan or read.inf):
            shape = ", ".join(map(str, read.shape))
            return read.name or called_by_user(tensor) or f"a {read.dtype}[{shape}] without a name"
    return "a tensor without a name"


def operand(tensor: Tensor, name: str) -> Operand:
    """Return a description of the values of a tensor. Sync: one or two."""
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    is_float = tensor.is_floating_point() or tensor.is_complex()
    values = float_values(tensor if is_float else tensor.detach().double())
    if values is None or not values.numel():
        return Operand(name, dtype, shape, None, None, 0, 0, 0)
    values = values.float() if values.element_size() == 1 else values
    finite = values[values.isfinite()]
    nan, inf, zeros = int(values.isnan().sum()), int(values.isinf().sum()), int((values == 0).sum())
    low, high = None, None
    if finite.numel():
        low, high = torch.stack(torch.aminmax(finite)).tolist()
    return Operand(name, dtype, shape, low, high, nan, inf, zeros)


def needs(call: OpCall) -> float | None:
    """Return the largest magnitude of the result of an op computed in float64.

    None if that is not finite, or if the op cannot run in float64. No tensor is changed.
    """
    if call.name == "copy_":
        return _amax(call.args[1])
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        return None
    try:
        result = in_wider(call, torch.float64)
    except (RuntimeError, TypeError, NotImplementedError):  # it has no kernel for float64
        return None
    found = [_amax(t) for t in tensors_in([result]) if t.is_floating_point()]
    return None if not found or None in found else max(amax for amax in found if amax is not None)


def in_wider(call: OpCall, dtype: torch.dtype) -> Any:
    """Return the result of an op with its inputs cast to a wider dtype.

    Raises:
        RuntimeError: It has no kernel for the dtype, or reads memory whose layout depends on it.
    """
    if any(argument.name in _OPAQUE for argument in schema_of(call.func).arguments):
        raise RuntimeError(f"{call.name} reads memory whose layout depends on the dtype")

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor):  # a copy, since the op may write to it
            is_float = value.is_floating_point()
            return value.detach().to(dtype, copy=True) if is_float else value.clone()
        return dtype if isinstance(value, torch.dtype) and value.is_floating_point else value

    args, kwargs = map_plain(widened, ([*call.args], call.kwargs))
    if call.name in _HALF_TO_FLOAT:
        args[2] = False
    return call.func(*args, **kwargs)


def _amax(tensor: Tensor) -> float | None:
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    amax: float = tensor.detach().double().abs().amax().item()
    return amax if math.isfinite(amax) else None


def names_in(model: nn.Module | None) -> Callable[[Tensor], str]:
    """Return a function that names parameters and buffers, and views and gradients of them."""
    if model is None:
        return lambda _: ""
    before = _names_by_memory(model)

    def name_of(tensor: Tensor) -> str:
        key, _ = _memory(tensor)
        # FSDP replaces parameters by gathered ones while a module runs.
        _, found = before.get(key) or _names_by_memory(model).get(key) or (None, {})
        return found.get(_offset(tensor), "") if len(found) > 1 else "".join(found.values())

    return name_of


def _names_by_memory(model: nn.Module) -> dict[int, tuple[object, dict[int, str]]]:
    """Return by the memory of tensors a reference to it, and their names by their offset in it."""
    names: dict[int, tuple[object, dict[int, str]]] = {}
    gradients = [(f"{name}.grad", param.grad) for name, param in model.named_parameters()]
    for name, tensor in (*model.named_buffers(), *model.named_parameters(), *gradients):
        if tensor is not None:
            key, reference = _memory(tensor)
            _, found = names.setdefault(key, (reference, {}))
            found[_offset(tensor)] = without_wrappers(name)
    return names


def _offset(tensor: Tensor) -> int:
    """Return the offset of a tensor in its memory; gradients may share one buffer."""
    if tensor.layout is not torch.strided:
        return 0
    return int(distributed.local_part(tensor.detach()).storage_offset())


def _memory(tensor: Tensor) -> tuple[int, object]:
    """Return a number for the memory of a tensor, and what keeps other memory from having it."""
    memory = storages.memory_of(distributed.local_part(tensor.detach()))
    return (id(tensor), tensor) if memory is None else (int(memory.cdata), memory)


# --- underflow ------------------------------------------------------------------------------------

SCALE_FACTORS = (2.0**-8, 2.0**-4, 2.0**4, 2.0**8)
"""Other scales, as multiples of the present one."""

_LARGEST_SCALE = 2.0**24
_Key = tuple[str, str, Phase, str, Line | None]


class FlushCounter(OpObserver):
    """Observer that counts the values that each op flushes to zero.

    Args:
        scale: The scale of the loss, None without one.

    Sync: one for each op that returns lower precision.
    """

    def __init__(self, scale: float | None) -> None:
        factors = () if scale is None else SCALE_FACTORS
        self._scales = {f * scale: f for f in factors if scale and 1 <= f * scale <= _LARGEST_SCALE}
        # Values, flushed ones, and in the backward pass those that each other scale flushes.
        self._counts: dict[_Key, list[int]] = {}
        self._lines: dict[int, Line | None] = {}
        self._wide: list[Tensor] | None = None

    def before(self, call: OpCall) -> None:
        """Compute the op in float32, before it can write to its inputs."""
        if call.phase != "backward":
            self._lines[call.number] = user_line()
        self._wide = _in_float32(call)

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Count the zeros that are not zero in float32."""
        wide, self._wide = self._wide, None
        if wide is None or len(wide) != len(outputs):
            return
        is_backward = call.phase == "backward"
        line = self._lines.get(call.place.number if is_backward else call.number)
        for result, exact in zip(outputs, wide, strict=True):
            format = FORMATS_BY_DTYPE.get(dtype_name(result.dtype))
            if format is None or result.shape != exact.shape:
                continue
            magnitudes = exact.abs()
            is_value = magnitudes != 0
            counts = [is_value.sum(), ((result == 0) & is_value).sum()]
            for factor in self._scales.values() if is_backward else ():
                counts.append(((magnitudes <= format.flushed_below / factor) & is_value).sum())
            key = (call.name, call.place.module, call.phase, dtype_name(result.dtype), line)
            before = self._counts.get(key, [0] * len(counts))
            found = torch.stack(counts).tolist()
            self._counts[key] = [sum(pair) for pair in zip(before, found, strict=True)]

    def found(self) -> tuple[Flush, ...]:
        """Return the ops that flush values, the largest shares first."""
        flushes = [
            Flush(*key, values, flushed, tuple(zip(self._scales, at_scales, strict=False)))
            for key, (values, flushed, *at_scales) in self._counts.items()
            if flushed
        ]
        return tuple(sorted(flushes, key=lambda flush: -flush.share))


def find_underflow(replayer: Replayer, scale: float | None) -> tuple[Flush, ...]:
    """Replay the step and return the ops that flush values."""
    counter = FlushCounter(scale)
    with replayer.run(Variant(scale=scale), counter) as run:
        if run.error is not None:
            error = f"{type(run.error).__name__}: {run.error}"
            replayer.notes.append(f"the replay for underflow ended with {error}")
        return counter.found()


def _in_float32(call: OpCall) -> list[Tensor] | None:
    """Return the result of an op in float32, None if it needs none or cannot compute it."""
    is_random = torch.Tag.nondeterministic_seeded in call.func.tags
    if makes_no_values(call.func) or is_random or not _may_flush(call):
        return None
    if call.name == "copy_":
        return [call.args[1].detach().float()]
    try:
        result = in_wider(call, torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return list(tensors_in([result]))


def _may_flush(call: OpCall) -> bool:
    lower = (torch.float16, torch.bfloat16)
    asked = call.kwargs.get("dtype")
    return asked in lower or any(tensor.dtype in lower for tensor in call.given)
