"""A closer look at one op of a replay: where it stands, what it reads, what it would need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.casts import tensors_in
from halfstep._autocast.module_names import without_wrappers
from halfstep._diagnose import across_ranks
from halfstep._diagnose.blame import Blame
from halfstep._diagnose.diagnosis import BadOp, Line, Operand
from halfstep._diagnose.lines import called_by_user, user_line
from halfstep._diagnose.watcher import OpCall, OpKey, Witness
from halfstep._numerics.measure import float_values
from halfstep._pytorch import storages
from halfstep._pytorch.dispatch import schema_of
from halfstep._trace.rows import dtype_name

# The argument that lets them return float32 for float16, which float64 does not have.
_HALF_TO_FLOAT = ("_softmax", "_log_softmax")
# Arguments that hold what a forward pass left in memory in a layout of its own, which depends on
# the dtype: an op that takes it for that of another dtype reads past its end.
_OPAQUE = {"workspace", "reserve", "reserveSpace", "weight_buf"}


class Look(Witness):
    """Looks at the op that is to blame, and at the one whose gradient it computes.

    Args:
        blame: What is to blame.
        model: Whose parameters have names.

    Attributes:
        has_seen: Whether the op was met, if there is one.
        tensor: What the tensor from outside is called.
    """

    def __init__(self, blame: Blame, model: nn.Module | None) -> None:
        self._key, self._of = blame.key, blame.of
        self._blame, self._names = blame, names_in(model)
        self._lines: dict[OpKey | None, Line | None] = {}
        self._forward_op: str | None = None
        self._inputs: tuple[Operand, ...] = ()
        self._output: Operand | None = None
        self._needs: float | None = None
        self.has_seen = blame.key is None
        self.tensor: str | None = None

    def before(self, call: OpCall) -> None:
        """Look at what the op reads, and compute it in float64."""
        if call.key not in (self._key, self._of):
            return
        self._lines[call.key] = user_line()
        if call.key == self._of:
            self._forward_op = call.name
        if call.key == self._key:
            self.has_seen = True
            self._inputs = tuple(self._operand(t) for t in call.given if t.is_floating_point())
            self._needs = needs(call)
            if self._blame.tensor is not None:
                self.tensor = name_of_bad(call, self._inputs, self._blame.tensor)

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Look at what it returned."""
        if call.key == self._key:
            bad = [t for t in outputs if t.is_floating_point() and not bool(t.isfinite().all())]
            self._output = self._operand(bad[0]) if bad else None

    def bad_op(self) -> BadOp:
        """Return what was seen."""
        line, forward_line = self._lines.get(self._key), self._lines.get(self._of)
        bad = described(self._blame, line, self._inputs, self._output, self._needs)
        if self._blame.phase == "backward":
            bad = replace(bad, forward_op=self._forward_op, forward_line=forward_line)
        return bad

    def _operand(self, tensor: Tensor) -> Operand:
        return operand(tensor, self._names(tensor))


def described(
    blame: Blame,
    line: Line | None,
    inputs: tuple[Operand, ...],
    output: Operand | None,
    needs: float | None,
) -> BadOp:
    """Return what is to blame, with what is known of it."""
    limit = None if output is None else torch.finfo(getattr(torch, output.dtype)).max
    place = blame.place
    return BadOp(
        op=blame.op,
        name=place.op or blame.op,
        module=place.module,
        call=place.call,
        phase=blame.phase,
        rule=place.rule,
        line=line,
        forward_op=None,
        forward_line=None,
        inputs=inputs,
        output=output,
        needs=needs,
        limit=limit,
    )


def name_of_bad(call: OpCall, inputs: tuple[Operand, ...], bad: Tensor) -> str:
    """Return what the user calls a tensor that an op reads and that is not finite."""
    floats = [tensor for tensor in call.given if tensor.is_floating_point()]
    for tensor, read in zip(floats, inputs, strict=True):
        if _key(tensor) == _key(bad) and (read.nan or read.inf):
            shape = ", ".join(map(str, read.shape))
            before = f"a {read.dtype}[{shape}] tensor that was there before the step"
            return read.name or called_by_user(tensor) or before
    return "a tensor that was there before the step"


def operand(tensor: Tensor, name: str) -> Operand:
    """Return what there is in a tensor. Sync: one or two."""
    values = float_values(tensor)
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
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
    """Return the largest magnitude of the result of an op if computed in float64.

    None if that is not finite, or if the op cannot be run so. Changes nothing.
    """
    if call.name == "copy_":
        return _amax(call.args[1])
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        return None
    try:
        result = in_wider(call, torch.float64)
    except (RuntimeError, TypeError, NotImplementedError):  # no kernel of it for float64
        return None
    found = [_amax(t) for t in tensors_in([result]) if t.is_floating_point()]
    return None if not found or None in found else max(amax for amax in found if amax is not None)


def in_wider(call: OpCall, dtype: torch.dtype) -> Any:
    """Return what an op returns if all that it reads is cast to a wider dtype.

    Raises:
        RuntimeError: There is no kernel for it, or it reads what only the dtype of the call can.
    """
    if any(argument.name in _OPAQUE for argument in schema_of(call.func).arguments):
        raise RuntimeError(f"{call.name} reads memory whose layout depends on the dtype")
    args = [_widened(value, dtype) for value in call.args]
    if call.name in _HALF_TO_FLOAT:
        args[2] = False
    return call.func(*args, **{key: _widened(v, dtype) for key, v in call.kwargs.items()})


def _widened(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        # A clone, since the op may write to it.
        return value.detach().to(dtype, copy=True) if value.is_floating_point() else value.clone()
    if isinstance(value, torch.dtype):
        return dtype if value.is_floating_point else value
    if isinstance(value, (list, tuple)):
        return [_widened(each, dtype) for each in value]
    return value


def _amax(tensor: Tensor) -> float | None:
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    amax: float = tensor.detach().double().abs().amax().item()
    return amax if math.isfinite(amax) else None


def names_in(model: nn.Module | None) -> Callable[[Tensor], str]:
    """Return what gives the name of a parameter or buffer, or of a view or gradient of one."""
    if model is None:
        return lambda _: ""
    before = _names_by_memory(model)

    def name_of(tensor: Tensor) -> str:
        key = _key(tensor)
        # FSDP puts gathered parameters in the place of the others while a module runs.
        found = before.get(key) or _names_by_memory(model).get(key) or {}
        return found.get(_offset(tensor), "") if len(found) > 1 else "".join(found.values())

    return name_of


def _names_by_memory(model: nn.Module) -> dict[int, dict[int, str]]:
    """Return the names of what lies in a piece of memory, by where it begins."""
    names: dict[int, dict[int, str]] = {}
    gradients = [(f"{name}.grad", param.grad) for name, param in model.named_parameters()]
    for name, tensor in (*model.named_buffers(), *model.named_parameters(), *gradients):
        if tensor is not None:
            offset = _offset(tensor)
            names.setdefault(_key(tensor), {})[offset] = without_wrappers(name)
    return names


def _offset(tensor: Tensor) -> int:
    """Return where a tensor begins in its memory; gradients may lie in one buffer."""
    if tensor.layout is not torch.strided:
        return 0
    return int(across_ranks.local_part(tensor).storage_offset())


def _key(tensor: Tensor) -> int:
    memory = storages.memory_of(across_ranks.local_part(tensor))
    return id(tensor) if memory is None else int(memory.cdata)
