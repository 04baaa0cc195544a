"""The context manager that records a run."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep._common.machine import device_name, num_ranks, rank
from halfstep._common.numbers import things
from halfstep._pytorch.listeners import (
    listening_to_backward,
    listening_to_norms,
    listening_to_torch_scaler,
)
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.record.files import SCHEMA, LateWriter, LineWriter, file_of
from halfstep._tools.record.models import Models
from halfstep._tools.record.recorder import Recorder
from halfstep._version import __version__
from halfstep.errors import CallOrderError
from halfstep.events import observe
from halfstep.sinks import Sink


class record:
    """Record a training run: every step, and statistics of the tensors in some steps.

    It writes one file of JSON Lines, flushed line by line, for ``halfstep report``:
    ``rank0.jsonl`` in the folder, or the file of the rank (from the environment variable ``RANK``
    or the process group). It appends to an existing file. docs/record.md describes its
    format, what is measured, and the cost.

    Recording does not change the training, bit for bit. In a step of the record each optimizer
    steps at most once, whatever scaler there is.

    Args:
        path: The folder; created if it does not exist.
        model: The model, for the names in the record. By default, the outermost modules that run
            with gradients.
        every: Number of steps from one sample of the tensors to the next; 0 for no samples. Steps
            1, 2, 4, 8 and so on before the first of these are sampled too. If several optimizers
            take turns without a scaler, one step of each.
        sinks: Objects with ``log(step, scalars)``, see :mod:`halfstep.sinks`.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``every`` is not a number of steps.
        CallOrderError: It is entered twice.
        RecordError: Another process, or another ``record`` of this one, writes to the folder; or it
            contains a ``rank0.jsonl`` of another program.
        OSError: The folder is not writable.

    Sync: none, except in sampled steps; numbers are read later, for many steps at once.

    Example:
        >>> import tempfile, halfstep
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with halfstep.record(tempfile.mkdtemp(), model=model) as run:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(2, 4)).square().mean().backward()
        ...         optimizer.step()
        >>> run.num_steps, run.num_skipped
        (3, 0)
    """

    _run_as: tuple[str, ...] = ()  # the words of the ``halfstep run`` that records

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module | None = None,
        every: int = 50,
        sinks: Sequence[Sink] = (),
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"record(path={type(path).__name__}): pass the folder to write to")
        if not (model is None or isinstance(model, nn.Module)):
            raise TypeError(f"record(model={type(model).__name__}): pass a torch.nn.Module")
        if not hasattr(every, "__index__") or every < 0:
            raise ValueError(
                f"record(every={every}): pass the number of steps between samples, or 0"
            )
        self.path = Path(path).absolute()
        self._model, self._every, self._sinks = model, int(every), sinks
        self._recorder: Recorder | None = None
        self._stack = ExitStack()

    def __repr__(self) -> str:
        steps = "not entered"
        if self._recorder is not None:
            steps = f"{things(self.num_steps, 'step')}, {self.num_skipped} skipped"
        return f"<record in {str(self.path)!r}: {steps}>"

    def __enter__(self) -> Self:
        if self._recorder is not None:
            raise CallOrderError(f"the record {self.path} has already been entered; make a new one")
        self._started = datetime.now(UTC)
        writer = self._writer()
        models = Models()
        if self._model is not None:
            models.add(self._model)
        recorder = Recorder(writer, models, self._every, self._sinks)
        with ExitStack() as stack:
            stack.enter_context(observe(recorder))
            stack.callback(register_optimizer_step_post_hook(recorder.after_step).remove)
            stack.enter_context(listening_to_backward(recorder.on_backward))
            stack.enter_context(listening_to_norms(recorder.on_norm))
            stack.enter_context(listening_to_torch_scaler(recorder.on_torch_scaler))
            self._stack = stack.pop_all()
        self._recorder, self._model = recorder, None
        return self

    def _writer(self) -> LineWriter | LateWriter:
        """Return what writes the record of this process, with its first line written."""
        writer = LineWriter(file_of(self.path, rank()))
        writer.write(
            {
                "event": "run",
                "schema": SCHEMA,
                "halfstep": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "rank": rank(),
                "world_size": num_ranks(),
                "device": None,  # written at the first step: the script chooses the device
                "machine": device_name("cpu"),
                "cores": os.cpu_count(),
                "started": self._started.isoformat(timespec="seconds"),
                "command": sys.argv,
                "every": self._every,
                "run_as": self._run_as,
            }
        )
        return writer

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._recorder is not None
        self._stack.close()
        self._recorder.close(_text(error))

    def add_diagnosis(self, diagnosis: Diagnosis, *, step: int | None = None) -> int:
        """Write a result of :func:`halfstep.diagnose` into the record, for the report.

        Args:
            diagnosis: The diagnosis.
            step: The number of its iteration. Default: inside an optimizer step, the iteration that
                the step ends; otherwise the last one that has ended, or 1.

        Returns:
            The number of its iteration.

        Raises:
            CallOrderError: The record has not been entered.

        Sync: none.

        Example:
            >>> import tempfile, halfstep
            >>> step = lambda: torch.zeros(1, requires_grad=True).log().sum().backward()
            >>> with halfstep.record(tempfile.mkdtemp()) as run:
            ...     run.add_diagnosis(halfstep.diagnose(step))
            1
        """
        return self._require_entered().add_diagnosis(diagnosis, step)

    def add_note(self, text: str) -> None:
        """Write a note for the reader; the same text is written only once.

        Args:
            text: A sentence.

        Raises:
            CallOrderError: The record has not been entered.

        Sync: none.
        """
        self._require_entered().say(text)

    def _require_entered(self) -> Recorder:
        if self._recorder is None:
            raise CallOrderError(f"the record {self.path} has not been entered: use `with`")
        return self._recorder

    @property
    def num_steps(self) -> int:
        """Number of iterations that have ended."""
        return 0 if self._recorder is None else self._recorder.num_steps

    @property
    def current_step(self) -> int:
        """The number of the iteration that is running, from 1."""
        return 1 if self._recorder is None else self._recorder.current_step

    @property
    def num_skipped(self) -> int:
        """Number of iterations with a step known to be skipped; complete after the block."""
        return 0 if self._recorder is None else len(self._recorder.skipped)


def _text(error: BaseException | None) -> str | None:
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
