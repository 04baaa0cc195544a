"""torch.amp in processes that halfstep has not touched, measured in turn with halfstep.

What halfstep registers for its own work stays in its process: kernels, hooks, wrappers. So every
ratio to ``torch.autocast`` or ``torch.amp`` is to runs in a process of their own. A third process
makes the same runs once more: their ratio to the first is noise.
"""

from __future__ import annotations

import importlib
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import halfstep

AGAIN = ", again"
"""Ends the names of the runs of the third process."""

PAUSE = 0.002
"""Seconds before a run, in which the threads of the process before end their busy wait."""

PACKAGE = str(Path(halfstep.__file__).parent)

Run = Callable[[], Any]
Make = Callable[..., Mapping[str, Run]]
"""``make(library, *args)`` returns runs by name; ``library`` is torch.amp or halfstep.

A function of a module, since each process imports it. What it and the runs take and return must be
plain data: numbers, texts, tuples.
"""


def measure(
    make: Make, *args: Any, rounds: int = 1, warm_up: int = 0, has_again: bool = True
) -> dict[str, list[Any]]:
    """Return what each run returns in each round, by its name.

    All runs of a round are made in a new random order, so that whatever else the machine does hits
    them alike.

    Args:
        make: Makes the runs, in each process.
        args: Its arguments after the library.
        rounds: The number of rounds.
        warm_up: The number of rounds before, whose results are dropped.
        has_again: Whether a third process makes the runs of torch.amp once more.
    """
    libraries = {"torch.amp": "", "halfstep": ""} | ({AGAIN: AGAIN} if has_again else {})
    with ExitStack() as stack:
        started = [stack.enter_context(process(make, library, args)) for library in libraries]
        runs: dict[str, tuple[Connection, str]] = {}
        for connection, ending in zip(started, libraries.values(), strict=True):
            runs |= {name + ending: (connection, name) for name in connection.recv()}
        found: dict[str, list[Any]] = {name: [] for name in runs}
        for round_ in range(-warm_up, rounds):
            _show(f"round {max(round_ + 1, 0)} of {rounds} ")
            for name in random.sample(list(runs), len(runs)):
                time.sleep(PAUSE)
                connection, asked = runs[name]
                connection.send(asked)
                result = connection.recv()
                if round_ >= 0:
                    found[name].append(result)
        _show("\n")
    return found


def _show(progress: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{progress}", end="", file=sys.stderr, flush=True)


@contextmanager
def process(make: Make, library: str, args: tuple[Any, ...]) -> Iterator[Connection]:
    """Start a process that makes runs; it first sends their names."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    threads = torch.get_num_threads()
    process = spawning.Process(target=_serve, args=(there, make, library, args, threads))
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def _serve(
    connection: Connection, make: Make, library: str, args: tuple[Any, ...], threads: int
) -> None:
    torch.set_num_threads(threads)
    is_clean = library != "halfstep"
    runs = make(importlib.import_module("torch.amp" if is_clean else library), *args)
    unchecked = set(runs) if is_clean else set()
    connection.send(list(runs))
    try:
        while True:
            name = connection.recv()
            run = runs[name]
            connection.send(_untouched(run) if name in unchecked else run())
            unchecked.discard(name)
    except EOFError:  # the end
        return


def _untouched(run: Run) -> Any:
    """Make a run; raise if it enters halfstep. The first one is slower for that."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    result = run()
    sys.setprofile(None)
    if entered:
        raise AssertionError(f"the process of torch.amp enters halfstep: {entered[:3]}")
    return result


# --- time -----------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call, the work of the device included."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    """Wait for a device."""
    if device != "cpu":
        torch.accelerator.synchronize()


def ratios(times: Sequence[float], to: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios within each round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times, to, strict=True)], n=4)
    return low, middle, high


def ratio(times: Sequence[float], to: Sequence[float]) -> str:
    """Return the median of the ratios within a round, and their quartiles."""
    low, middle, high = ratios(times, to)
    return f"{middle:6.3f} ({low:.3f}-{high:.3f})"
