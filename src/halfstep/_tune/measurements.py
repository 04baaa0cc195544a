"""Measurements of a tuning, in a file from which a later call continues.

The file is JSON Lines: the first line is a fingerprint of what is measured, each other line a
measurement. Measurements on a cut or damaged line are made again.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from msgspec import Struct
from torch import Tensor

from halfstep._autocast.casts import tensors_in
from halfstep._common.json import decoded, to_plain
from halfstep._common.machine import device_name
from halfstep._numerics.formats import dtype_name
from halfstep._record.files import has_checksum, line_of
from halfstep._tune.passes import Lowering
from halfstep._tune.task import Task
from halfstep._version import __version__
from halfstep.errors import RecordError

SCHEMA = 1

Fingerprint: TypeAlias = dict[str, str]


def fingerprint(task: Task, batches: Sequence[Any], lowering: Lowering) -> Fingerprint:
    """Return all that must stay the same for measurements to be valid, as short texts by name."""
    modules = [(name, type(module).__name__) for name, module in task.named_modules()]
    state = [*task.model.parameters(), *task.model.buffers()]
    shapes = [[_described(tensor) for tensor in tensors_in([batch])] for batch in batches]
    device = task.device(batches[0])
    return {
        "schema": str(SCHEMA),
        "halfstep": __version__,
        "torch": torch.__version__,
        "machine": device_name(device),
        "dtype": dtype_name(lowering.dtype),
        "policy": str(lowering.policy),
        "error": str(lowering.error or "by dtype and depth"),
        "model": f"{type(task.model).__name__} {_hash(str(modules))}",
        "mode": "train" if task.model.training else "eval",
        "weights": _hash(*state),
        "loss": getattr(task.loss_fn, "__qualname__", type(task.loss_fn).__name__),
        "batches": "; ".join(", ".join(each) for each in shapes),
        "values of the batches": _hash(*tensors_in(batches)),
    }


class _Measurement(Struct, tag_field="event", tag="measured"):
    """Line with a measurement."""

    key: list[Any]
    value: Any


class Measurements:
    """Measurements by their keys, kept in memory and in a file if there is one.

    Args:
        path: The file, or None. Measurements in an existing file are read.
        fingerprint: The fingerprint of what is measured.

    Raises:
        RecordError: The file has measurements of something else; the message says what differs.
        OSError: The file cannot be read or written.
    """

    def __init__(self, path: Path | None, fingerprint: Fingerprint) -> None:
        self._known: dict[Hashable, Any] = {}
        self._path = path
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path, fingerprint)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"event": "tune", **fingerprint})

    def get(self, key: list[Any]) -> Any:
        """Return a measurement, None if it was not made yet."""
        return self._known.get(json.dumps(key))

    def add(self, key: list[Any], value: Any) -> None:
        """Add a measurement of plain values, and write it."""
        plain = to_plain(value)
        self._known[json.dumps(key)] = plain
        if self._path is not None:
            self._write({"event": "measured", "key": key, "value": plain})

    def __len__(self) -> int:
        return len(self._known)

    def _write(self, event: Mapping[str, Any]) -> None:
        assert self._path is not None
        with self._path.open("ab") as file:
            file.write(line_of(dict(event)))

    def _read(self, path: Path, fingerprint: Fingerprint) -> None:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        first, *lines = whole.split(b"\n")
        try:
            header = decoded(dict[str, str], first)
        except ValueError:
            header = {}
        if header.get("event") != "tune":
            raise RecordError(f"{path} is not a record of a tuning: give another file")
        _require_same(path, header, fingerprint)
        if whole != data:  # the last line was cut
            path.write_bytes(whole)
        for line in lines:
            with suppress(ValueError):  # a damaged line is measured again
                has_checksum(line)
                event = decoded(_Measurement, line)
                self._known[json.dumps(event.key)] = event.value


def _require_same(path: Path, header: Mapping[str, str], fingerprint: Fingerprint) -> None:
    differs = [
        f"{name}: {header.get(name)!r} there, {value!r} here"
        for name, value in fingerprint.items()
        if header.get(name) != value
    ]
    if differs:
        raise RecordError(
            f"{path} has measurements of something else ({'; '.join(differs)}): give another file, "
            "or restore the same conditions (torch.manual_seed before the model is built)"
        )


def _described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _hash(*values: str | Tensor) -> str:
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(_described(value).encode())
            held = value.detach().to("cpu").contiguous()
            digest.update(ctypes.string_at(held.data_ptr(), held.nbytes))  # works without NumPy
        else:
            digest.update(value.encode())
    return digest.hexdigest()[:16]
