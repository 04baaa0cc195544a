"""Watching ops run: a dispatch mode that writes a :class:`Row` for each.

It sees ops where they compute, below autocast and autograd: the casts of autocast are ops of their
own there. Which rule made them is told by the kernels of halfstep; which module an op of the
backward pass belongs to, by the number of its node, noted in the forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor, nn

from halfstep._autocast import scopes
from halfstep._autocast.casts import tensors_in
from halfstep._autocast.kernels import PolicyOnDevice
from halfstep._autocast.rule import Rule
from halfstep._trace.clock import Clock
from halfstep._trace.modules import RunningModules
from halfstep._trace.op_mode import OpMode, autocast_of_caller
from halfstep._trace.ops import casts_to, computes_nothing, device_of, op_name, written_to
from halfstep._trace.places import Places
from halfstep._trace.rows import Cast, Row, Value, cast_bytes, computed_in
from halfstep._trace.tensors import Memories


class _Thread(threading.local):
    """What a trace keeps of a thread.

    Attributes:
        casts: Made under plain ``torch.autocast``: by its kernels for the next op, or by hand.
            Each with a row of its own.
        of_cast: In the backward pass: the cast whose gradient the last op computed.
    """

    def __init__(self) -> None:
        self.casts: list[Row] = []
        self.of_cast: int | None = None


class Tracer(OpMode):  # type: ignore[no-untyped-call]
    """Writes a row for every op of a thread. Changes no tensor and takes no random number."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = RunningModules(model)
        self.policies: dict[str, None] = {}  # in the order in which they decided first
        self._memories = Memories(model)
        self._rows: list[Row] = []
        self._clock = Clock()
        self._numbers = count()
        self._by_hand: set[int] = set()
        super().__init__(Places(self.modules, lambda leaf: self._memories.value(leaf).name))
        self._thread = _Thread()

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
        with self._places.under(op, rule, policy) as ruled:
            try:
                yield
            finally:
                if ruled.casts:  # no op of it followed
                    self._write_casts(self._row(ruled.op, (), policy.device), ruled.casts)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an op and write it down."""
        device = device_of(given, kwargs)
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
        """Take the gradient that a backward pass begins with for a part of that."""
        if self._rows and (self._rows[-1].op, self._rows[-1].phase) == ("ones_like", "forward"):
            self._rows[-1] = replace(self._rows[-1], phase="backward")

    # --- writing ----------------------------------------------------------------------------------

    def _note_cast(self, row: Row, to: str, result: int) -> None:
        source, ruled = row.inputs[-1], self._places.ruled
        self._memories.note_cast(source, result)
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
            self._memories.name(value.storage, name)
        ran = replace(row, inputs=inputs, compute=compute, outputs=outputs, casts=tuple(casts))
        self._rows.append(ran)
        casts.clear()

    def _pending(self, row: Row) -> list[Cast]:
        """Return the casts that belong to an op."""
        here, ruled = self._thread, self._places.ruled
        if ruled:
            return ruled[-1].casts
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


def _is_under_pytorchs_autocast(row: Row) -> bool:
    """Say whether autocast is that of PyTorch, with its own kernels."""
    return row.device not in scopes.current().policies and row.autocast is not None
