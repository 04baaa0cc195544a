"""Trace context: records what runs in its block."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch import nn

from halfstep._autocast.kernels import observed_by
from halfstep._common.force_eager import eager
from halfstep._pytorch import compiler
from halfstep._trace.recording import Recording
from halfstep._trace.rows import Row
from halfstep._trace.tracer import Tracer
from halfstep._version import __version__
from halfstep.errors import CallOrderError

_EAGER = "compiled code ran in eager mode for the trace: ops of compiled code cannot be seen"


class trace(Recording):
    """Record every op of a block: its module, dtypes, rule, casts and time.

    Autocast may be entered inside the block or around it, or not at all. A trace changes no result
    and no random number, bit for bit; every op takes longer. A process runs one trace at a time.
    docs/trace.md explains the rows, the findings, and what is not seen.

    Args:
        model: The model; rows have the names of its modules.

    Raises:
        TypeError: ``model`` is not a module.
        CallOrderError: A trace is running already, this one has run before, or another thread
            leaves it than entered it.

    Sync: none in the block; the methods wait for the ops on CUDA.

    Example:
        >>> import halfstep
        >>> model, x = nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1)), torch.ones(2, 8)
        >>> with trace(model) as t, halfstep.autocast("cpu", torch.bfloat16):
        ...     y = model(x)
        >>> for row in t.rows():
        ...     print(row["module"], row["op"], row["compute_dtype"], row["rule"])
        0 addmm bfloat16 linear:lower
        1 _softmax float32 softmax:fp32-dtype
        >>> [cast["bytes"] for cast in t.rows()[1]["casts"]]  # 2 x 4 elements, 2 and 4 bytes each
        [48]
        >>> t
        <trace: 2 ops, policy standard>
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"trace({type(model).__name__}): pass the model, a torch.nn.Module: its names show "
                "where an op belongs"
            )
        super().__init__((), {})
        self._is_compiled = any(map(compiler.is_compiled, model.modules()))
        self._model: nn.Module | None = model
        self._tracer: Tracer | None = None
        self._stack, self._thread = ExitStack(), threading.get_ident()

    def __enter__(self) -> Self:
        if self._model is None:
            raise CallOrderError(
                "this trace has run; make another: with halfstep.trace(model) as t"
            )
        tracer = Tracer(self._model)
        with ExitStack() as stack:
            stack.enter_context(observed_by(tracer.observe))
            stack.enter_context(tracer.modules.followed())
            stack.enter_context(eager(has_global_hooks=self._is_compiled))
            stack.enter_context(tracer)
            self._stack = stack.pop_all()
        self._model, self._tracer, self._thread = None, tracer, threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        """The ops, each with the tensors that it read and wrote, as plain data."""
        self._read()
        return self._ops

    def _read(self) -> None:
        if self._tracer is not None:
            self._ops = self._tracer.rows()
            policies = list(self._tracer.policies)
            self.environment = _environment(self._ops, policies)
            self.notes = tuple(self._notes(policies, self._tracer.modules.have_run))

    def _notes(self, policies: list[str], model_has_run: bool) -> Iterator[str]:
        if self._is_compiled:
            yield _EAGER
        if self._ops and not model_has_run:
            yield "no module of the model ran: is this the model that was called?"
        if len(policies) > 1:
            others = " and ".join(policies[1:])
            yield f"other policies were used too ({others}): casts() starts from the first"


def _environment(ops: tuple[Row, ...], policies: list[str]) -> dict[str, str]:
    devices = dict.fromkeys(row.device for row in ops)
    names = {"cpu": platform.machine()}
    if "cuda" in devices:
        names["cuda"] = torch.cuda.get_device_name()
    found = {
        "halfstep": __version__,
        "torch": torch.__version__,
        "device": ", ".join(f"{d} ({names[d]})" if d in names else d for d in devices),
    }
    return found | ({"policy": policies[0]} if policies else {})
