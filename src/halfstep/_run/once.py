"""Showing an error that all ranks raise once."""

from __future__ import annotations

import hashlib
import sys
from types import TracebackType

import torch

from halfstep._pytorch import distributed


def show_once(error: BaseException) -> None:
    """Let one rank show the error that now ends the script, with its traceback; the others a line.

    It is the first to come here, not rank 0: a launcher ends the others as soon as one has failed.
    """
    if _is_first(error):
        return
    rank = torch.distributed.get_rank()

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        print(f"[rank{rank}]: {kind.__name__}, shown by another rank", file=sys.stderr)

    sys.excepthook = excepthook


def _is_first(error: BaseException) -> bool:
    """Say whether no other rank has shown the same."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    digest = hashlib.sha256(str(error).encode()).hexdigest()[:16]
    try:
        return int(distributed.default_store().add(f"halfstep/error/{digest}", 1)) == 1
    except RuntimeError:  # the store is gone, with the rank that held it
        return True
