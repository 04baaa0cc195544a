"""Exit codes, errors for the user, and Ctrl-C."""

from __future__ import annotations

import argparse
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


class CommandError(Exception):
    """One line for the user: what is wrong and what to do; printed without a traceback."""


def require_rich() -> None:
    """Raise an error for the user if rich is not installed."""
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        raise CommandError(
            "needs the package rich, which is not installed; install it with: pip install rich"
        ) from None


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a command, as its help lists them."""
    return re.findall(r"^  (?:-\w[^,\n]*, )?(--[\w-]+)", parser.format_help(), re.MULTILINE)


@contextmanager
def ending_at_interrupts(*, by_signal: bool) -> Iterator[None]:
    """Let Ctrl-C end this process in the block, at once and without a traceback.

    PyTorch takes seconds to import, and its dependencies turn a KeyboardInterrupt into errors.

    Args:
        by_signal: End by the signal, as a process that does not handle SIGINT; a shell reports 130
            for it as well. Otherwise exit with 130.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL if by_signal else _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nInterrupted.\n")
    os._exit(EXIT_INTERRUPTED)
