"""Counts of the code: size, repeated mechanisms, and the walls between the rooms.

    python benchmarks/code_counts.py

It prints the first table of benchmarks/README.md. Nothing is imported from halfstep, and nothing is
timed. The circles and the imports behind a room's public files are those of ``lint-imports``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC, TESTS = ROOT / "src" / "halfstep", ROOT / "tests"

MULTIPLIERS = (
    r"^    multiplier: Scalar",
    r"^    stage: Stage",
    r"\bleft_scaled\b",
    r"\bself\.(?:_check_of|in_doubt)\b",
    r"^    num_losses: int = 0\n    versions: ",
    r"\bself\.waiting: dict",
    r"\b_witnesses\b",
    r"^class FreshGradients\b",
)
"""The places that answered, each by its own rule, what a gradient is multiplied by."""


def texts(*folders: Path) -> list[str]:
    """Return the contents of the Python files in folders."""
    files = (file for folder in folders for file in sorted(folder.rglob("*.py")))
    return [file.read_text(encoding="utf-8") for file in files]


def size(*folders: Path) -> str:
    """Return the numbers of lines and of files."""
    found = texts(*folders)
    lines = sum(text.count("\n") for text in found)
    return f"{lines:,}; {len(found)}"


def matches(pattern: str, among: Iterable[str]) -> int:
    """Return the number of matches of a pattern."""
    return sum(len(re.findall(pattern, text, re.MULTILINE)) for text in among)


def multipliers() -> str:
    """Return how many of the former places are left, besides a ledger."""
    rooms = texts(SRC / "_scaler", SRC / "_tools" / "run")
    others = [text for text in rooms if "class Ledger:" not in text]
    left = sum(matches(place, others) > 0 for place in MULTIPLIERS)
    return f"{left} of these" + (" and a ledger" * (SRC / "_scaler" / "ledger.py").exists())


def contracts(*words: str) -> str:
    """Return how many contracts of import-linter with these words are broken, of how many."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith(words)]
    states = [re.search(r"\b(KEPT|BROKEN)\b", line) for line in lines]
    named = [state[1] for state in states if state]
    return f"{named.count('BROKEN')} of {len(named)} contracts broken"


def rows() -> Iterator[tuple[str, str, str, object]]:
    """Yield what is counted, before, the goal, and now."""
    src, tests = texts(SRC), texts(TESTS)
    yield "lines; files in `src`", "47,027; 195", "36,000; 165", size(SRC)
    scaler = size(SRC / "_scaler", SRC / "_gradients")
    yield "of the scaler, with `_gradients`", "8,429; 28", "6,000; 22", scaler
    yield "answers to what a gradient is multiplied by", "8", "1", multipliers()
    transitions = matches(r"^def next_state\(", src) + (SRC / "_scaler" / "table.py").exists()
    yield "implementations of the scale's transition", "2", "1", transitions
    nones = matches(r"^ *assert .+ is not None\b", src)
    yield "`assert ... is not None` in `src`", "67", "15", nones
    yield "circles, type checkers' imports included", "2", "0", contracts("No file knows")
    reaches = contracts("Nobody reaches", "Each room imports")
    yield "imports behind the public files of a room", "38", "0", reaches
    yield "lines; files in `tests`", "61,726; 267", "54,000", size(TESTS)
    builders = matches(r"^def (?:train|run|make|batches|model)\(", tests)
    what = "definitions of `train`, `run`, `make`, `batches`, `model` in `tests`"
    yield what, "68", "8", builders


def main() -> None:
    print("| counted | before | at most | now |\n|---|---|---|---|")
    for what, before, goal, now in rows():
        print(f"| {what} | {before} | {goal} | {now} |")


if __name__ == "__main__":
    main()
