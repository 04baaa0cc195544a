"""What a process of the pool does: take a task, make a process group, run it, answer."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TELL_STACK = signal.SIGUSR1


@dataclass(frozen=True)
class Task:
    """One call of ``Pool.run``."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    store: str  # file by which the ranks find each other
    group_timeout: float


@dataclass(frozen=True)
class Done:
    """What ``work`` returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank: its traceback, and the exception if it can be pickled."""

    text: str
    original: BaseException | None
    when: float


def serve(connection: Connection[Any, Any], rank: int, num_ranks: int, stack: str) -> None:
    """Answer tasks until the pool closes."""
    import torch
    import torch.distributed.tensor  # slow, and most tests need it

    torch.set_num_threads(1)
    gc.freeze()  # what was imported; DistributedDataParallel is looked for among all other objects
    # pytest names modules of folders with an __init__.py from here.
    sys.path.append(str(Path(__file__).parents[1]))
    connection.send_bytes(b"ready")
    with open(stack, "w") as file:
        faulthandler.register(TELL_STACK, file=file)
        faulthandler.enable(file)  # and after a crash of the interpreter
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_answer(message, rank, num_ranks))


def _answer(message: bytes, rank: int, num_ranks: int) -> bytes:
    import torch.distributed as dist

    try:
        # As in the test suite, a warning is an error, and a test's own filters end with it.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            task: Task = pickle.loads(message)
            _join(task, rank, num_ranks)
            return pickle.dumps(Done(task.work(rank, *task.args)))
    except BaseException as error:
        return _told(error)  # before the others lose their connection: the earliest is the cause
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(task: Task, rank: int, num_ranks: int) -> None:
    import torch
    import torch.distributed as dist

    random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(task.store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=task.group_timeout),
    )
    dist.barrier()  # work without a collective may end while the others still connect


def _told(error: BaseException) -> bytes:
    failure = Failure(traceback.format_exc(), error, time.monotonic())
    try:
        pickle.loads(pickled := pickle.dumps(failure))
    except Exception:
        return pickle.dumps(Failure(failure.text, None, failure.when))
    return pickled
