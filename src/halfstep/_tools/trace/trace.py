"""The trace context, and the dispatch mode that writes a row for each op in its block.

The mode sees ops where they compute, below autocast and autograd, where autocast's casts are
separate ops. halfstep's kernels report the rule behind each cast.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, Self

from torch import Tensor, nn

from halfstep._autocast import Rule
from halfstep._common.formats import dtype_name
from halfstep._common.module_names import without_wrappers
from halfstep._common.nested import tensors_in
from halfstep._common.numbers import things
from halfstep._pytorch import compiler
from halfstep._pytorch.storages import ByMemory
from halfstep._tools.trace.ops import (
    OpMode,
    RunningModules,
    autocast_of_caller,
    casts_to,
    computes_nothing,
    device_of,
    op_name,
    written_to,
)
from halfstep._tools.trace.rows import Cast, Row, Value, cast_bytes, computed_in, table_of
from halfstep.errors import CallOrderError
from halfstep.events import PolicyOnDevice, active_policies, observe_ops

_NOT_RUN = "no module of the model ran: is this the model that was called?"
_EAGER = "compiled code ran in eager mode for the trace: ops of compiled code cannot be seen"


class trace:
    """Record every op of a block: its module, dtypes, rule and casts.

    Autocast may be entered inside the block or around it, or not at all. A trace changes no result
    and no random number, bit for bit; every op takes longer. A process runs one trace at a time.
    docs/trace.md explains the rows and what is not seen.

    Args:
        model: The model; rows have the names of its modules.

    Raises:
        TypeError: ``model`` is not a module.
        CallOrderError: A trace is running already, this one has run before, or another thread
            leaves it than entered it.

    Sync: none.

    Example:
        >>> import torch, halfstep
        >>> model, x = nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1)), torch.ones(2, 8)
        >>> with trace(model) as t, halfstep.autocast("cpu", torch.bfloat16):
        ...     y = model(x)
        >>> for row in t.ops:
        ...     print(row.module, row.op, row.compute, row.rule)
        0 addmm bfloat16 linear:lower
        1 _softmax float32 softmax:fp32-dtype
        >>> [cast.bytes for cast in t.ops[1].casts]  # 2 x 4 elements, 2 and 4 bytes each
        [48]
        >>> t
        <trace: 2 ops, policy standard: table(), ops>
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"trace({type(model).__name__}): pass the model, a torch.nn.Module: its names show "
                "where an op belongs"
            )
        self._ops: tuple[Row, ...] = ()
        self.policies: tuple[str, ...] = ()  # their texts, in the order of first use
        self.notes: tuple[str, ...] = ()  # for the reader, on how it was recorded
        self._is_compiled = any(map(compiler.is_compiled, model.modules()))
        self._model: nn.Module | None = model
        self._tracer: Tracer | None = None
        self._stack, self._thread = ExitStack(), threading.get_ident()

    def __repr__(self) -> str:
        num_ops = sum(not row.is_cast_only for row in self.ops)
        policy = f"policy {self.policies[0]}" if self.policies else "no policy"
        return f"<trace: {things(num_ops, 'op')}, {policy}: table(), ops>"

    def __enter__(self) -> Self:
        if self._model is None:
            raise CallOrderError(
                "this trace has run; make another: with halfstep.trace(model) as t"
            )
        tracer = Tracer(self._model)
        with ExitStack() as stack:
            stack.enter_context(observe_ops(tracer.observe))
            stack.enter_context(tracer.active())
            self._stack = stack.pop_all()
        self._model, self._tracer, self._thread = None, tracer, threading.get_ident()
        return self

    def __exit__(self, *error: object) -> None:
        if threading.get_ident() != self._thread:
            raise CallOrderError(
                "a trace was left in a thread that did not enter it, and is still running; leave "
                "it in the thread that entered it"
            )
        self._stack.close()
        self._read()
        self._tracer = None  # releases the model

    @property
    def ops(self) -> tuple[Row, ...]:
        """The ops, each with the tensors that it read and wrote: ``pandas.DataFrame(t.ops)``."""
        self._read()
        return self._ops

    def table(self) -> str:
        """Return the ops by phase and module as text; equal calls share a line."""
        return table_of(self.ops, [*self.notes, *(f"policy {text}" for text in self.policies)])

    def _read(self) -> None:
        if self._tracer is not None:
            self._ops = self._tracer.rows()
            self.policies = tuple(self._tracer.policies)
            self.notes = tuple(self._notes(self._tracer.modules.have_run))

    def _notes(self, model_has_run: bool) -> Iterator[str]:
        if self._is_compiled:
            yield _EAGER
        if self._ops and not model_has_run:
            yield _NOT_RUN


# --- the mode -------------------------------------------------------------------------------------


class StorageIds:
    """Numbers and names of storages. Keeps no tensor alive."""

    def __init__(self, model: nn.Module) -> None:
        self._numbers: ByMemory[int] = ByMemory()
        self._count = count()
        self._names: dict[int, str] = {}
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
        self._names.setdefault(number, name)

    def value(self, tensor: Tensor) -> Value:
        number = self.number(tensor)
        # Nested tensors have no sizes, or symbolic ones; their values have real ones.
        whole = tensor.detach().values() if tensor.is_nested else tensor
        return Value(
            storage=number,
            shape=tuple(whole.shape),
            dtype=dtype_name(tensor.dtype),
            name=self._names.get(number, ""),
        )


class Tracer(OpMode):  # type: ignore[no-untyped-call]
    """A mode that writes a row for every op of a thread, without affecting results."""

    def __init__(self, model: nn.Module) -> None:
        self.policies: dict[str, None] = {}  # in order of first use
        self._ids = StorageIds(model)
        self._rows: list[Row] = []
        super().__init__(RunningModules(model))

    def rows(self) -> tuple[Row, ...]:
        self._write_by_hand(self.of_thread.casts)
        self.of_thread.casts = []
        return tuple(self._rows)

    @contextmanager
    def observe(self, op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[None]:
        self.policies[str(policy.policy)] = None
        with self.places.under(op, rule, policy) as ruled:
            try:
                yield
            finally:
                if ruled.casts:  # no component op followed
                    self._write_casts(self._row(ruled.op, (), policy.device), ruled.casts)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        device = device_of(given, kwargs)
        to = casts_to(func, args, kwargs)
        row = self._row(op_name(func), tuple(map(self._ids.value, given)), device)
        result = func(*args, **kwargs)
        found = list(tensors_in((result,))) or tensors_in(written_to(func, args, kwargs))
        outputs = tuple(map(self._ids.value, found))
        if to is not None:
            self._note_cast(row, to, outputs[0].storage)
        elif not computes_nothing(func, row.inputs, outputs):
            self._note(row, outputs)
        return result

    # --- where ------------------------------------------------------------------------------------

    def _row(self, op: str, inputs: tuple[Value, ...], device: str) -> Row:
        ruled = self.places.ruled
        last = self._rows[-1] if self._rows else None
        is_seed = last is not None and (last.op, last.phase) == ("ones_like", "forward")
        if is_seed and self.places.backward_begins():  # the pass makes its initial gradient
            self._rows[-1] = replace(self._rows[-1], phase="backward")
        place, phase = self.places.place(op)
        return Row(
            module=place.module,
            call=place.call,
            phase=phase,
            op=op,
            inputs=inputs,
            rule=place.rule,
            ruled_op=place.op if place.rule else None,
            autocast=ruled[-1].lower if ruled else autocast_of_caller(device),
            device=device,
            compute="",
            outputs=(),
            casts=(),
        )

    # --- writing ----------------------------------------------------------------------------------

    def _note_cast(self, row: Row, to: str, result: int) -> None:
        source, ruled = row.inputs[-1], self.places.ruled
        self._ids.name(result, source.name)
        size = cast_bytes(source.shape, source.dtype, to)
        cast = Cast(source, to, result, size, by_hand=False)
        if ruled:
            ruled[-1].casts.append(cast)
        elif row.phase == "backward" or row.rule is not None:  # of a gradient, or into an island
            self._write_casts(row, [cast])
        elif row.autocast is not None and row.device not in active_policies():  # made by PyTorch
            self.of_thread.casts.append(replace(row, casts=(cast,)))
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
        here, ruled = self.of_thread, self.places.ruled
        if ruled:
            return ruled[-1].casts
        # PyTorch's kernels cast what the next op reads. A cast by hand may look the same.
        reads = {value.storage for value in row.inputs}
        pending, here.casts = here.casts, []
        self._write_by_hand([each for each in pending if each.casts[0].result not in reads])
        return [each.casts[0] for each in pending if each.casts[0].result in reads]

    def _write_by_hand(self, rows: list[Row]) -> None:
        for row in rows:
            self._write_casts(row, [replace(cast, by_hand=True) for cast in row.casts])

    def _write_casts(self, row: Row, casts: list[Cast]) -> None:
        """Write casts without a subsequent op."""
        inputs = tuple(cast.source for cast in casts)
        self._rows.append(replace(row, op="_to_copy", inputs=inputs, casts=tuple(casts)))
