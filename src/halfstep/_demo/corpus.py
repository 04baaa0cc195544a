"""The text of the demo as tokens: a training part, a held-out part, and batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfstep.errors import DemoError

LARGEST_FILE = 128 * 2**20
"""Maximum size of a text in bytes; converting it to tokens takes about 12 times as much memory."""


@dataclass(frozen=True)
class Corpus:
    """A text as character numbers, int64."""

    source: str
    vocab: int  # number of different characters
    train: Tensor
    held_out: Tensor  # every tenth of a hundred blocks, never trained on

    @classmethod
    def load(cls, path: Path | None, context: int) -> Corpus:
        """Read a UTF-8 file, or Python's own documentation, and split it.

        Raises:
            DemoError: The file cannot be read, is not a text, or is too short for ``context``.
        """
        # repr: a file name may hold line breaks, control characters or undecodable bytes.
        source = "pydoc_data.topics" if path is None else repr(str(path))
        text = python_text() if path is None else read_text(path)
        shortest = 20 * (context + 1)
        if len(text) < shortest:
            raise DemoError(
                f"{source} is too short: {len(text)} characters, and a context of {context} needs "
                f"{shortest} or more; give a longer --text or a smaller --size"
            )
        return cls(source, *_number_and_split(text))


def python_text() -> str:
    """Return the ``help()`` topics of Python: about 460 thousand characters of English."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, with or without a byte order mark.

    Raises:
        DemoError: It is missing, a directory, unreadable, empty, too large, or not UTF-8 text.
    """
    name = repr(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise DemoError(f"cannot read --text {name}: {reason}; name a text file") from None
    if not data.strip():
        raise DemoError(f"{name} is empty; --text needs a file with some pages of text")
    if b"\0" in data:
        raise DemoError(f"{name} is a binary file (it contains NUL bytes); --text needs UTF-8 text")
    if len(data) > LARGEST_FILE:
        limit = LARGEST_FILE // 2**20
        raise DemoError(f"{name} is larger than {limit} MiB; make a smaller one: head -n 100000")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DemoError(
            f"{name} is not UTF-8 text (byte {error.start} cannot be decoded); "
            "convert it: iconv -f LATIN1 -t UTF-8"
        ) from None


def _number_and_split(text: str) -> tuple[int, Tensor, Tensor]:
    """Return the number of different characters, the training part and the held-out part."""
    codes = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    characters, tokens = torch.unique(codes, return_inverse=True)
    block = len(tokens) // 100
    # From the whole text: its end alone may differ in style from the rest.
    is_held_out = (torch.arange(len(tokens)) // block) % 10 == 9
    return len(characters), tokens[~is_held_out], tokens[is_held_out]


def draw_batches(
    tokens: Tensor, steps: int, batch: int, context: int, seed: int, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw windows at random positions, which depend only on the seed, not on the device.

    Yields:
        ``steps`` pairs of inputs and targets, int64 ``[batch, context]``; a target is the character
        after its input.
    """
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
        drawn = tokens[starts + window].to(device)
        yield drawn[:, :-1], drawn[:, 1:]


def held_out_windows(
    tokens: Tensor, context: int, at_most: int = 256
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some non-overlapping windows of a text, evenly spread.

    Yields:
        Inputs and targets, int64 ``[1 to 32, context]``, at most ``at_most`` rows altogether.
    """
    windows = tokens[: len(tokens) // (context + 1) * (context + 1)].view(-1, context + 1)
    every = max(1, len(windows) // at_most)
    for part in torch.split(windows[::every][:at_most], 32):
        yield part[:, :-1], part[:, 1:]
