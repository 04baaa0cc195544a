"""Watching ops run: a dispatch mode that writes a :class:`Row` for each.

It sees ops where they compute, below autocast and autograd: the casts of autocast are ops of their
own there. Which rule made them is told by the kernels of halfstep; which module an op of the
backward pass belongs to, by the number of its node, noted in the forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from halfstep import _torch
from halfstep.casting import scopes
from halfstep.casting.plans import PolicyOnDevice
from halfstep.casting.rule import Rule
from halfstep.tracing.clock import Clock
from halfstep.tracing.modules import OUTSIDE, RunningModules
from halfstep.tracing.ops import casts_to, computes_nothing, device_of, op_name
from halfstep.tracing.rows import Cast, Phase, Row, Value, cast_bytes, dtype_name, promoted
from halfstep.tracing.tensors import Memories, tensors_in


@dataclass
class _Ruled:
    """An op that runs by a rule.

    Attributes:
        op: Its name.
        rule: The text of the rule.
        autocast: The lower precision.
        casts: Made for the next op that computes something in it.
    """

    op: str
    rule: str
    autocast: str
    casts: list[Cast] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """What an op belongs to.

    Attributes:
        module: The path of its module.
        call: Which call of it.
        rule: The text of the rule that decided.
        op: What that rule was asked for.
        cast: The number of the cast, if it is one.
    """

    module: str
    call: int
    rule: str | None
    op: str | None
    cast: int | None = None


@dataclass(frozen=True)
class _Op:
    """An op that runs now; what it is made of is that of a :class:`Row`."""

    number: int
    name: str
    inputs: tuple[Value, ...]
    place: _Place
    phase: Phase
    device: str


_NOWHERE = _Place("", 0, None, None)


class _Thread(threading.local):
    """What runs in a thread.

    Attributes:
        ruled: The ops that run by a rule, each inside the one before it.
        casts: Made under plain ``torch.autocast``: by its kernels for the next op, or by hand.
        next_node: The number that the next node of autograd got when an op was last seen.
        nodes: What the nodes of autograd that it made were made for, by their numbers.
        records: For each backward pass whether gradients are recorded in it.
        recomputed: Backward passes that began in it after something was recomputed.
        phase: That of the last op.
    """

    def __init__(self) -> None:
        self.ruled: list[_Ruled] = []
        self.casts: list[tuple[_Op, Cast]] = []
        self.next_node = _torch.next_sequence_number()
        self.nodes: dict[int, _Place] = {}
        self.records: dict[int, bool] = {}
        self.recomputed: set[int] = set()
        self.phase: Phase = "forward"


class Tracer(_torch.DispatchMode):  # type: ignore[no-untyped-call]
    """Writes a row for every op of a thread. Changes no tensor and takes no random number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = RunningModules(model)
        self.policy: str | None = None
        self._memories = Memories(model)
        self._rows: list[Row] = []
        self._clock = Clock()
        self._numbers = count()
        self._by_hand: set[int] = set()
        self._thread = _Thread()
        self._nodes = self._thread.nodes  # of the thread that runs the forward pass

    def rows(self) -> tuple[Row, ...]:
        """Return all rows up to now. Sync: waits for the ops on CUDA."""
        self._write_by_hand(self._thread.casts)
        self._thread.casts = []
        seconds = self._clock.read()

        def timed(cast: Cast) -> Cast:
            return replace(cast, seconds=seconds[cast.number])

        return tuple(
            replace(
                row,
                seconds=seconds.get(row.number, 0.0),
                casts=tuple(map(timed, row.casts)),
            )
            for row in self._rows
        )

    @contextmanager
    def observe(self, op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[None]:
        """Take what runs meanwhile for parts of ``op``, for which ``rule`` decided."""
        self.policy = self.policy or str(policy.policy)
        lower = dtype_name(torch.get_autocast_dtype(policy.device))
        ruled = _Ruled(op.rpartition(".")[0], str(rule), lower)
        stack = self._thread.ruled
        stack.append(ruled)
        try:
            yield
        finally:
            if ruled.casts:  # no op of it followed
                place, phase = self._place(ruled.op, None)
                self._write_casts(_Op(0, "", (), place, phase, policy.device), ruled.casts)
            stack.pop()

    @_torch.keep_out_of_graphs
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op and write it down."""
        kwargs = kwargs or {}
        number, to = next(self._numbers), casts_to(func, args, kwargs)
        given = list(tensors_in((args, kwargs)))
        device = device_of(given, kwargs)
        place, phase = self._place(op_name(func), number if to else None)
        inputs = tuple(map(self._memories.value, given))
        op = _Op(number, op_name(func), inputs, place, phase, device)
        with self._clock.taken(number, device):
            result = func(*args, **kwargs)
        outputs = tuple(map(self._memories.value, tensors_in(result)))
        if to is not None:
            self._note_cast(op, to, outputs[0].storage)
        elif not computes_nothing(func, inputs, outputs):
            self._note(op, outputs)
        return result

    # --- where ------------------------------------------------------------------------------------

    def _place(self, op: str, cast: int | None) -> tuple[_Place, Phase]:
        """Return what an op belongs to, and note that for the nodes that were made for it."""
        here, task = self._thread, _torch.backward_number()
        call, ruled = self.modules.innermost(), here.ruled[-1] if here.ruled else None
        phase: Phase = "forward"
        if task < 0:
            place = _Place((call or OUTSIDE).module, (call or OUTSIDE).index, None, None)
        else:
            if task not in here.records and here.phase == "recompute":
                here.recomputed.add(task)
            records = here.records.setdefault(task, torch.is_grad_enabled())
            # On CUDA the backward pass, and what it recomputes, runs in a thread of autograd.
            nodes = here.nodes if task in here.recomputed else self._nodes
            node = _torch.running_sequence_number()
            place = nodes.get(-1 if node is None else node, _NOWHERE)
            phase = "backward"
            if call is not None and call.in_backward:
                place, phase = _Place(call.module, call.index, None, None), "recompute"
            elif torch.is_grad_enabled() and not records:  # a function that is no module
                place, phase = _Place(place.module, place.call, None, None), "recompute"
        if ruled is not None:
            place = replace(place, rule=ruled.rule, op=ruled.op)
        following = _torch.next_sequence_number()
        made_for = place if phase == "backward" else replace(place, op=place.op or op)
        for node in range(here.next_node, following):
            here.nodes[node] = replace(made_for, cast=cast)
        here.next_node, here.phase = following, phase
        return place, phase

    # --- writing ----------------------------------------------------------------------------------

    def _note_cast(self, op: _Op, to: str, result: int) -> None:
        source, here = op.inputs[-1], self._thread
        self._memories.name(result, source.name)
        size = cast_bytes(source.shape, source.dtype, to)
        cast = Cast(op.number, source, to, result, size, False, None)
        if here.ruled:
            here.ruled[-1].casts.append(cast)
        elif op.phase == "backward":
            cast = replace(cast, gradient_of=op.place.cast, by_hand=op.place.cast in self._by_hand)
            self._write_casts(op, [cast])
        elif _is_under_pytorchs_autocast(op.device):
            here.casts.append((op, cast))
        else:
            self._write_by_hand([(op, cast)])

    def _note(self, op: _Op, outputs: tuple[Value, ...]) -> None:
        dtypes = [(value.dtype, value.shape) for value in (*op.inputs, *outputs[:1])]
        compute = promoted(dtypes) or next((value.dtype for value in (*outputs, *op.inputs)), "")
        casts = self._pending(op)
        cast_from = {cast.result: cast.source for cast in casts}
        sources = tuple(
            replace(cast_from.get(value.storage, value), shape=value.shape) for value in op.inputs
        )
        module = op.place.module
        for value in outputs:
            name = f"{module} {op.name}" if module else op.name
            self._memories.name(value.storage, f"output of {name}")
        self._write(replace(op, inputs=sources), compute, outputs, casts)
        casts.clear()

    def _pending(self, op: _Op) -> list[Cast]:
        """Return the casts that belong to an op."""
        here = self._thread
        if here.ruled:
            return here.ruled[-1].casts
        # A kernel of PyTorch casts what the op then reads. Casts by hand may look the same.
        reads = {value.storage for value in op.inputs}
        pending, here.casts = here.casts, []
        self._write_by_hand([each for each in pending if each[1].result not in reads])
        return [cast for _, cast in pending if cast.result in reads]

    def _write_by_hand(self, casts: list[tuple[_Op, Cast]]) -> None:
        for op, cast in casts:
            self._by_hand.add(cast.number)
            self._write_casts(op, [replace(cast, by_hand=True)])

    def _write_casts(self, op: _Op, casts: list[Cast]) -> None:
        """Write casts that no op follows."""
        if casts:
            sources = tuple(cast.source for cast in casts)
            alone = replace(op, number=next(self._numbers), name="_to_copy", inputs=sources)
            self._write(alone, "", (), casts)

    def _write(self, op: _Op, compute: str, outputs: tuple[Value, ...], casts: list[Cast]) -> None:
        self._rows.append(
            Row(
                number=op.number,
                module=op.place.module,
                call=op.place.call,
                phase=op.phase,
                op=op.name,
                inputs=op.inputs,
                compute=compute,
                outputs=outputs,
                rule=op.place.rule,
                ruled_op=op.place.op if op.place.rule else None,
                autocast=self._lower_precision(op.device),
                casts=tuple(casts),
                device=op.device,
            )
        )

    def _lower_precision(self, device: str) -> str | None:
        if self._thread.ruled:
            return self._thread.ruled[-1].autocast
        return _autocast_dtype(device)


def _autocast_dtype(device: str) -> str | None:
    if device not in _torch.autocast_devices():
        return None
    switches = _torch.autocast_switches_of_caller(device)
    return dtype_name(switches.dtype) if switches.enabled else None


def _is_under_pytorchs_autocast(device: str) -> bool:
    """Say whether autocast is that of PyTorch, with its own kernels."""
    return device not in scopes.current().policies and _autocast_dtype(device) is not None
