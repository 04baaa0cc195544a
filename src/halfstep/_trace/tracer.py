"""Tracer: a dispatch mode that writes a :class:`Row` for each op.

It sees ops where they compute, below autocast and autograd; there the casts of autocast are ops of
their own. halfstep's kernels report which rule made them. An op of the backward pass belongs to the
module for which its node of autograd was made in the forward pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast import scopes
from halfstep._autocast.kernels import PolicyOnDevice
from halfstep._autocast.modules import without_wrappers
from halfstep._autocast.rule import Rule
from halfstep._common.nested import tensors_in
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch import autograd
from halfstep._pytorch.storages import ByMemory
from halfstep._trace.ops import (
    OpMode,
    autocast_of_caller,
    casts_to,
    computes_nothing,
    device_of,
    op_name,
    written_to,
)
from halfstep._trace.places import OpPlaces, RunningModules
from halfstep._trace.rows import Cast, Row, Value, cast_bytes, computed_in


class StorageIds:
    """Numbers and names of the storages of tensors. It keeps no tensor alive."""

    def __init__(self, model: nn.Module) -> None:
        self._numbers: ByMemory[int] = ByMemory()
        self._count = count()
        self._names: dict[int, str] = {}
        self._models: dict[int, int] = {}
        self._weights = {self.number(parameter) for parameter in model.parameters()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.name(self.number(tensor), without_wrappers(name))

    def number(self, tensor: Tensor) -> int:
        """Return the number of the storage of a tensor; a new number if it has no storage."""
        found = self._numbers.get(tensor)
        if found is None:
            found = next(self._count)
            self._numbers.put(tensor, found)
        return found

    def name(self, number: int, name: str) -> None:
        """Name a storage, unless it has a name."""
        self._names.setdefault(number, name)

    def note_cast(self, source: Value, result: int) -> None:
        """Give the result of a cast the name of its source; it is a weight if that is one."""
        self.name(result, source.name)
        if source.is_weight:
            self._weights.add(result)

    def note_model(self, model: Value, result: Value) -> None:
        """Note that a tensor was made like another one."""
        if model.dtype == result.dtype:
            self._models[result.storage] = model.storage

    def value(self, tensor: Tensor) -> Value:
        """Return a tensor as plain data."""
        number = self.number(tensor)
        return Value(
            storage=number,
            version=autograd.version_of(tensor),
            offset=int(tensor.storage_offset()) if tensor.layout is torch.strided else 0,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            name=self._names.get(number, ""),
            requires_grad=tensor.requires_grad and torch.is_grad_enabled(),
            is_weight=number in self._weights,
            like=self._models.get(number),
        )


class Clock:
    """Times of ops by their numbers: from the host clock on the CPU, from events on CUDA."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[Any, Any]] = {}

    @contextmanager
    def timed(self, number: int, device: str) -> Iterator[None]:
        """Time a block that runs on a device type. Sync: none."""
        mark = _recorded_event if device == "cuda" else time.perf_counter
        begin = mark()
        try:
            yield
        finally:
            self._marks[number] = (begin, mark())

    def read(self) -> dict[int, float]:
        """Return all times in seconds. Sync: waits for every event."""
        return {number: _seconds_between(*marks) for number, marks in self._marks.items()}


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class _Thread(threading.local):
    """State of a trace in one thread.

    Attributes:
        casts: The casts made under plain ``torch.autocast``, by its kernels for the next op or by
            hand, each with a row of its own.
        of_cast: In the backward pass, the cast whose gradient the last op computed.
    """

    def __init__(self) -> None:
        self.casts: list[Row] = []
        self.of_cast: int | None = None


class Tracer(OpMode):  # type: ignore[no-untyped-call]
    """Writes a row for every op of a thread. It changes no tensor and draws no random number."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = RunningModules(model)
        self.policies: dict[str, None] = {}  # in the order in which they decided first
        self._ids = StorageIds(model)
        self._rows: list[Row] = []
        self._clock = Clock()
        self._numbers = count()
        self._by_hand: set[int] = set()
        super().__init__(OpPlaces(self.modules))
        self._thread = _Thread()

    def rows(self) -> tuple[Row, ...]:
        """Return all rows so far. Sync: waits for the ops on CUDA."""
        self._write_by_hand(self._thread.casts)
        self._thread.casts = []
        seconds = self._clock.read()
        return tuple(
            replace(
                row,
                seconds=seconds.get(row.number, 0.0),
                casts=tuple(replace(cast, seconds=seconds[cast.number]) for cast in row.casts),
            )
            for row in self._rows
        )

    @contextmanager
    def observe(self, op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[None]:
        """Count the ops of the block as parts of ``op``, for which ``rule`` decided."""
        self.policies[str(policy.policy)] = None
        with self._places.under(op, rule, policy) as ruled:
            try:
                yield
            finally:
                if ruled.casts:  # no op of it followed
                    self._write_casts(self._row(ruled.op, (), policy.device), ruled.casts)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an op and write its row."""
        device = device_of(given, kwargs)
        to = casts_to(func, args, kwargs)
        row = self._row(op_name(func), tuple(map(self._ids.value, given)), device, to)
        with self._clock.timed(row.number, device):
            result = func(*args, **kwargs)
        found = list(tensors_in((result,))) or tensors_in(written_to(func, args, kwargs))
        outputs = tuple(map(self._ids.value, found))
        if to is not None:
            self._note_cast(row, to, outputs[0].storage)
        elif not computes_nothing(func, row.inputs, outputs):
            self._note(row, outputs)
        elif row.op == "empty_like":
            self._ids.note_model(row.inputs[0], outputs[0])
        return result

    # --- where ------------------------------------------------------------------------------------

    def _row(
        self, op: str, inputs: tuple[Value, ...], device: str, cast_to: str | None = None
    ) -> Row:
        """Return the row of an op before it runs."""
        number, ruled = next(self._numbers), self._places.ruled
        if self._places.backward_begins():
            self._note_seed()
        place, phase = self._places.place(op, number, is_cast=cast_to is not None)
        self._thread.of_cast = place.cast
        autocast, cache = ruled[-1].switches if ruled else autocast_of_caller(device)
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
            compute="",
            outputs=(),
            casts=(),
            seconds=0.0,
        )

    def _note_seed(self) -> None:
        """Count the gradient with which a backward pass begins as a part of that pass."""
        if self._rows and (self._rows[-1].op, self._rows[-1].phase) == ("ones_like", "forward"):
            self._rows[-1] = replace(self._rows[-1], phase="backward")

    # --- writing ----------------------------------------------------------------------------------

    def _note_cast(self, row: Row, to: str, result: int) -> None:
        source, ruled = row.inputs[-1], self._places.ruled
        self._ids.note_cast(source, result)
        size = cast_bytes(source.shape, source.dtype, to)
        cast = Cast(row.number, source, to, result, size, False, None)
        if ruled:
            ruled[-1].casts.append(cast)
        elif row.phase == "backward":
            of = self._thread.of_cast
            self._write_casts(row, [replace(cast, gradient_of=of, by_hand=of in self._by_hand)])
        elif _is_under_pytorchs_autocast(row):
            self._thread.casts.append(replace(row, casts=(cast,)))
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
            self._ids.name(value.storage, name)
        ran = replace(row, inputs=inputs, compute=compute, outputs=outputs, casts=tuple(casts))
        self._rows.append(ran)
        casts.clear()

    def _pending(self, row: Row) -> list[Cast]:
        """Return the casts that belong to an op."""
        here, ruled = self._thread, self._places.ruled
        if ruled:
            return ruled[-1].casts
        # A kernel of PyTorch casts what the op reads next. A cast by hand may look the same.
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


def _is_under_pytorchs_autocast(row: Row) -> bool:
    """Return whether autocast is PyTorch's own, with its own kernels."""
    return row.device not in scopes.policies() and row.autocast is not None
