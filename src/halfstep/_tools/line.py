"""A line of the user's code as a value and as text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from halfstep._tools.json import Count


@dataclass(frozen=True)
class Line:
    """Line of the user's code.

    Attributes:
        file: The path of the file.
        number: The number of the line, from 1.
        function: The name of its function.
        text: The line itself, without surrounding spaces.
    """

    file: str
    number: Count
    function: str
    text: str


@dataclass(frozen=True)
class LineEdit:
    """Replacement of a statement in the user's code.

    Attributes:
        file: The path of the file.
        first: The number of the statement's first line, from 1.
        last: The number of its last line.
        text: The new lines, with their indentation.
    """

    file: str
    first: Count
    last: Count
    text: str


def line_text(line: Line) -> str:
    """Return a line with its location; the path is relative to the working directory."""
    return f"{short_path(line.file)}:{line.number} in {line.function}: {line.text}"


def short_path(file: str) -> str:
    """Return a path relative to the working directory if it is inside, else unchanged."""
    path = Path(file)
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else file
