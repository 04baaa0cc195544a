"""Sentences as values with a severity and marked names, formatting of text, and warnings."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal, TextIO, TypeAlias

from halfstep.errors import HalfstepWarning

Severity: TypeAlias = Literal["good", "notice", "warning", "bad"]
SEVERITIES: tuple[Severity, ...] = ("bad", "warning", "notice", "good")
"""All severities, worst first."""


@dataclass(frozen=True)
class Code:
    """A name, or a piece of code, in a sentence."""

    text: str  # raw: it may come from outside, so escape it


@dataclass(frozen=True)
class Sentence:
    """One piece of information for the reader."""

    severity: Severity
    what: tuple[str | Code, ...]  # plain text and names in order; both may come from outside
    cure: tuple[str | Code, ...] = ()  # what to do about it; empty if there is nothing to do
    evidence: str = ""  # the id of the part of the page that shows it
    follows: bool = False  # whether it is a consequence of another problem of the run

    @property
    def parts(self) -> tuple[str | Code, ...]:
        return self.what + self.cure

    @property
    def text(self) -> str:
        """The sentence in one line, names in backticks."""
        return one_line("".join(f"`{p.text}`" if isinstance(p, Code) else p for p in self.parts))


def say(
    severity: Severity,
    *what: str | Code,
    cure: Iterable[str | Code] = (),
    evidence: str = "",
    follows: bool = False,
) -> Sentence:
    return Sentence(severity, what, tuple(cure), evidence, follows)


def names(of: Iterable[str], most: int = 3, num: int = 0) -> Iterator[str | Code]:
    """Yield names as the parts of a list, ``a, b and 3 more``; ``num``: with those not in it."""
    all_of_them = list(of)
    shown, left = all_of_them[:most], max(len(all_of_them), num) - most
    for position, name in enumerate(shown):
        if position:
            yield " and " if position == len(shown) - 1 and left <= 0 else ", "
        yield Code(name)
    if left > 0:
        yield f" and {left} more"


def names_text(of: Iterable[str]) -> str:
    return "".join(each if isinstance(each, str) else each.text for each in names(of))


def one_line(text: str) -> str:
    """Return text without line breaks, control characters and surrogates."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+", " ", text)


def printable(text: str) -> str:
    """Return text with unprintable characters, such as ESC and direction marks, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'softmax'?"`` for the names closest to ``name``, or ""."""
    return suggestion(near_names(name, known))


def shown(value: object) -> str:
    """Return a wrong argument with its type, ``'1' (str)``; only its type if its repr is long."""
    text, kind = repr(value), type(value).__name__
    is_short = len(text) <= 60 and "\n" not in text and not text.startswith("<")
    return f"{text} ({kind})" if is_short else kind


_MEANT = dict.fromkeys(("gpu", "nvidia", "amd", "rocm"), "cuda") | {"metal": "mps"}  # devices


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names closest to one, at most three."""
    return difflib.get_close_matches(_MEANT.get(name.lower(), name), set(known), n=3)


def suggestion(meant: Iterable[object]) -> str:
    """Return the end of a message that suggests what was meant; "" for nothing."""
    names = " or ".join(repr(str(each)) for each in meant)
    return f"; did you mean {names}?" if names else ""


# --- on a terminal --------------------------------------------------------------------------------

_COLORS = {"bad": 31, "warning": 33, "notice": 36, "good": 32}  # of the ANSI standard
_SENTENCE = re.compile(rf"( *)({'|'.join(_COLORS)}|what followed): ")


def tell(text: str, file: TextIO | None = None, *, flush: bool = False) -> None:
    """Print lines to stdout or another stream; names in them are escaped.

    On a terminal, sentences are wrapped and their severity is colored; elsewhere each is one line,
    for grep. ``NO_COLOR`` is respected (https://no-color.org).
    """
    lines = [printable(line) for line in text.split("\n")]
    stream = sys.stdout if file is None else file
    if stream is None:
        return
    if stream.isatty():
        width = shutil.get_terminal_size().columns
        lines = [_on_terminal(line, width) for line in lines]
    stream.write("\n".join(lines) + "\n")  # a program may replace print()
    if flush:
        stream.flush()


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line on stderr in place of the last one, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def show(text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]:{width}}\r", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")


def _on_terminal(line: str, width: int) -> str:
    found = _SENTENCE.match(line)
    if found is None:
        return line
    indent, word = found.groups()
    wrapped = textwrap.fill(
        line,
        width,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    if word not in _COLORS or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return wrapped
    return wrapped.replace(word, f"\x1b[{_COLORS[word]}m{word}\x1b[0m", 1)


TableLine: TypeAlias = str | tuple[str, ...]
"""A line of a table: text that spans all columns, or the cells."""


def aligned(
    lines: Sequence[TableLine],
    indent: int = 0,
    right: Iterable[str] = ("n", "bytes"),
    empty: str = "-",
) -> list[str]:
    """Return lines with their cells aligned in columns; the first line is the header.

    Text lines are not changed. Columns whose header is in ``right`` are right-aligned; those with
    nothing but ``empty`` are left out.
    """
    columns = list(zip(*(line for line in lines if isinstance(line, tuple)), strict=True))
    shown = [index for index, (_, *cells) in enumerate(columns) if set(cells) - {empty}]
    formats = [
        f"{'>' if columns[i][0] in right else '<'}{max(map(len, columns[i]))}" for i in shown
    ]

    def text(line: TableLine) -> str:
        if isinstance(line, str):
            return line
        cells = (f"{line[i]:{form}}" for i, form in zip(shown, formats, strict=True))
        return (" " * indent + "  ".join(cells)).rstrip()

    return [text(line) for line in lines if isinstance(line, str) or shown]


# --- warnings that name the line of the user's code -----------------------------------------------


_NOT_THE_USERS = ("halfstep.", "torch.", "warnings")


def outside(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """Return the innermost frame outside of halfstep and PyTorch, and which it is, from 1."""
    number = 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        frame, number = frame.f_back, number + 1
    return frame, number


def warn(text: str, category: type[Warning] = HalfstepWarning) -> None:
    """Issue a warning at the line :func:`outside`: accelerate hides those of PyTorch's modules."""
    _, number = outside(sys._getframe(1))
    warnings.warn(text, category, stacklevel=number + 1)
