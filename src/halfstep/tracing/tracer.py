"""Watching ops run: a dispatch mode that writes a :class:`Row` for each.

It sees ops where they compute, below autocast and autograd: the casts of autocast are ops of their
own there. Which rule made them is told by the kernels of halfstep; which module an op of the
backward pass belongs to, by the number of its node, noted in the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn

from halfstep import _torch
from halfstep.casting import scopes
from halfstep.casting.casts import tensors_in
from halfstep.casting.plans import PolicyOnDevice
from halfstep.casting.rule import Rule
from halfstep.tracing.clock import Clock
from halfstep.tracing.modules import Call, RunningModules
from halfstep.tracing.ops import casts_to, computes_nothing, device_of, op_name, written_to
from halfstep.tracing.rows import Cast, Phase, Row, Value, cast_bytes, computed_in, dtype_name
from halfstep.tracing.state import Place, Ruled, ThreadState
from halfstep.tracing.tensors import Memories, is_dense


class Tracer(_torch.DispatchMode):  # type: ignore[no-untyped-call]
    """Writes a row for every op of a thread. Changes no tensor and takes no random number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = RunningModules(model)
        self.policies: dict[str, None] = {}  # in the order in which they decided first
        self._memories = Memories(model)
        self._rows: list[Row] = []
        self._clock = Clock()
        self._numbers = count()
        self._by_hand: set[int] = set()
        self._thread = ThreadState()
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
        self.policies[str(policy.policy)] = None
        # Read here: the kernel may switch off PyTorch's cache for the casts that it makes.
        switches = _torch.autocast_switches(policy.device)
        lower = dtype_name(switches.dtype)
        ruled = Ruled(op.rpartition(".")[0], rule, (lower, switches.cache))
        stack = self._thread.ruled
        stack.append(ruled)
        try:
            yield
        finally:
            if ruled.casts:  # no op of it followed
                self._write_casts(self._row(ruled.op, (), policy.device), ruled.casts)
            stack.pop()

    @_torch.keep_out_of_graphs
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op and write it down."""
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        device = device_of(given, kwargs)
        if _torch.is_made_of_others(func, device) and all(map(is_dense, given)):
            return self._take_apart(func, device, args, kwargs)
        to = casts_to(func, args, kwargs)
        row = self._row(op_name(func), tuple(map(self._memories.value, given)), device, to)
        with self._clock.taken(row.number, device):
            result = func(*args, **kwargs)
        found = list(tensors_in((result,))) or tensors_in(written_to(func, args, kwargs))
        outputs = tuple(map(self._memories.value, found))
        if to is not None:
            self._note_cast(row, to, outputs[0].storage)
        elif not computes_nothing(func, row.inputs, outputs):
            self._note(row, outputs)
        elif row.op == "empty_like":
            self._memories.note_model(row.inputs[0], outputs[0])
        return result

    def _take_apart(
        self, func: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a composite as its parts: in inference mode nothing above this mode does so.

        Autocast, off in a mode, is on for the parts unless a kernel of it has cast for them all.
        """
        here, before = self._thread, self._thread.is_cast
        here.is_cast = before or self._is_cast_by_autocast(func, device)
        is_on = not here.is_cast and _autocast_of_caller(device)[0] is not None
        try:
            with _torch.autocast_again(device) if is_on else nullcontext(), self:
                return _torch.decompose(func, args, kwargs)
        finally:
            here.is_cast = before

    def _is_cast_by_autocast(self, func: Any, device: str) -> bool:
        if device in scopes.current().policies:
            ruled = self._thread.ruled
            return bool(ruled) and ruled[-1].rule.action != "leave"
        name = f"{op_name(func)}.{func._overloadname}"
        return name in _torch.overloads_with_autocast_kernel(device)

    # --- where ------------------------------------------------------------------------------------

    def _row(
        self, op: str, inputs: tuple[Value, ...], device: str, cast_to: str | None = None
    ) -> Row:
        """Return the row of an op before it runs."""
        number, ruled = next(self._numbers), self._thread.ruled
        place, phase = self._place(op, number if cast_to else None)
        autocast, cache = ruled[-1].switches if ruled else _autocast_of_caller(device)
        return Row(
            number=number,
            module=place.module,
            call=place.call,
            phase=phase,
            op=op,
            inputs=inputs,
            rule=place.rule,
            ruled_op=place.op if place.rule else None,
            autocast=autocast,
            cache=cache,
            device=device,
        )

    def _place(self, op: str, cast: int | None) -> tuple[Place, Phase]:
        """Return what an op belongs to, and note that for the nodes that were made for it."""
        here, task = self._thread, _torch.backward_number()
        call, ruled = self.modules.innermost(), here.ruled[-1] if here.ruled else None
        phase: Phase = "forward"
        if task < 0:
            place = Place(call.module, call.number) if call else Place()
        else:
            place, phase = self._place_in_backward(task, call, op)
        if ruled is not None:
            place = place._replace(rule=str(ruled.rule), op=ruled.op)
        following = _torch.next_sequence_number()
        made_for = place if phase == "backward" else place._replace(op=place.op or op)
        for node in range(here.next_node, following):
            here.nodes[node] = made_for._replace(cast=cast)
        here.next_node, here.place, here.phase = following, place, phase
        return place, phase

    def _place_in_backward(self, task: int, call: Call | None, op: str) -> tuple[Place, Phase]:
        here = self._thread
        if task not in here.records:
            self._note_seed()
            if here.phase == "recompute":
                here.recomputed.add(task)
        records = here.records.setdefault(task, torch.is_grad_enabled())
        # On CUDA the backward pass, and what it recomputes, runs in a thread of autograd.
        nodes = here.nodes if task in here.recomputed else self._nodes
        node = _torch.running_sequence_number()
        place = nodes.get(-1 if node is None else node, Place())
        if call is not None and call.in_backward:
            return Place(call.module, call.number), "recompute"
        if torch.is_grad_enabled() and not records:  # a function that is no module
            return Place(place.module, place.call), "recompute"
        into = _torch.accumulated_into()
        if into is not None:
            return Place(self._memories.value(into).name.rpartition(".")[0]), "backward"
        if op in ("add", "add_"):  # autograd's sum of gradients, by no rule
            place = place._replace(rule=None, op=None)
        return place, "backward"

    def _note_seed(self) -> None:
        """Take the gradient that a backward pass begins with for a part of that."""
        if self._rows and (self._rows[-1].op, self._rows[-1].phase) == ("ones_like", "forward"):
            self._rows[-1] = replace(self._rows[-1], phase="backward")

    # --- writing ----------------------------------------------------------------------------------

    def _note_cast(self, row: Row, to: str, result: int) -> None:
        source, here = row.inputs[-1], self._thread
        self._memories.note_cast(source, result)
        size = cast_bytes(source.shape, source.dtype, to)
        cast = Cast(row.number, source, to, result, size, False, None)
        if here.ruled:
            here.ruled[-1].casts.append(cast)
        elif row.phase == "backward":
            of = here.place.cast
            self._write_casts(row, [replace(cast, gradient_of=of, by_hand=of in self._by_hand)])
        elif _is_under_pytorchs_autocast(row):
            here.casts.append(replace(row, casts=(cast,)))
        else:
            self._write_by_hand([replace(row, casts=(cast,))])

    def _note(self, row: Row, outputs: tuple[Value, ...]) -> None:
        compute, casts = computed_in(row.inputs, outputs), self._pending(row)
        cast_from = {cast.result: cast.source for cast in casts}
        inputs = tuple(
            replace(cast_from.get(value.storage, value), shape=value.shape) for value in row.inputs
        )
        name = f"output of {row.module} {row.op}" if row.module else f"output of {row.op}"
        for value in outputs:
            self._memories.name(value.storage, name)
        ran = replace(row, inputs=inputs, compute=compute, outputs=outputs, casts=tuple(casts))
        self._rows.append(ran)
        casts.clear()

    def _pending(self, row: Row) -> list[Cast]:
        """Return the casts that belong to an op."""
        here = self._thread
        if here.ruled:
            return here.ruled[-1].casts
        # A kernel of PyTorch casts what the op then reads. Casts by hand may look the same.
        reads = {value.storage for value in row.inputs}
        pending, here.casts = here.casts, []
        self._write_by_hand([each for each in pending if each.casts[0].result not in reads])
        return [each.casts[0] for each in pending if each.casts[0].result in reads]

    def _write_by_hand(self, rows: list[Row]) -> None:
        for row in rows:
            (cast,) = row.casts
            self._by_hand.add(cast.number)
            self._write_casts(row, [replace(cast, by_hand=True)])

    def _write_casts(self, row: Row, casts: list[Cast]) -> None:
        """Write casts that no op follows."""
        self._rows.append(
            replace(
                row,
                number=next(self._numbers),
                op="_to_copy",
                inputs=tuple(cast.source for cast in casts),
                casts=tuple(casts),
            )
        )


def _autocast_of_caller(device: str) -> tuple[str | None, bool]:
    """Return the lower precision, None where autocast is off, and whether casts are kept."""
    if device not in _torch.autocast_devices():
        return None, False
    switches = _torch.autocast_switches_of_caller(device)
    return (dtype_name(switches.dtype) if switches.enabled else None), switches.cache


def _is_under_pytorchs_autocast(row: Row) -> bool:
    """Say whether autocast is that of PyTorch, with its own kernels."""
    return row.device not in scopes.current().policies and row.autocast is not None
