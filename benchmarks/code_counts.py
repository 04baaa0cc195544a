"""Counts of the code: size, repeated mechanisms, and the walls between the rooms.

    python benchmarks/code_counts.py [--check]

It prints the first table of benchmarks/README.md. Nothing is imported from halfstep, and nothing is
timed. The circles and the imports behind a room's public files are those of ``lint-imports``.
Programs that tests read, in folders named ``corpus``, are data and count for nothing.

With ``--check`` it compares the size of each folder with ``limits.toml`` instead, as ``make check``
does, and fails with what is too large.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC, TESTS = ROOT / "src" / "halfstep", ROOT / "tests"
LIMITS = "limits.toml"

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


def python_files(*folders: Path) -> Iterator[Path]:
    """Yield the Python files in folders, but for data."""
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            if "corpus" not in file.parts:
                yield file


def texts(*folders: Path) -> list[str]:
    """Return the contents of the Python files in folders."""
    return [file.read_text(encoding="utf-8") for file in python_files(*folders)]


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


def room_of(file: Path) -> str:
    """Return the folder whose limit holds for a file: a room of ``src``, or a folder of tests."""
    parts = file.relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 4 if "_tools" in parts else 3 if parts[0] == "src" else 2])


def sizes() -> dict[str, dict[str, int]]:
    """Return the lines of each room and the words of the pages, as ``limits.toml`` names them."""
    lines: dict[str, int] = {}
    for file in python_files(SRC, TESTS):
        text = file.read_text(encoding="utf-8")
        lines[room_of(file)] = lines.get(room_of(file), 0) + text.count("\n")
    pages = subprocess.run(
        ["git", "ls-files", "docs/*.md"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.split()
    words = {
        name: sum(len((ROOT / page).read_text(encoding="utf-8").split()) for page in among)
        for name, among in (("docs", pages), ("README.md", ["README.md"]))
    }
    return {"lines": lines, "words": words}


def passed_limits() -> Iterator[str]:
    """Yield what is larger than ``limits.toml`` allows, and what has no limit there."""
    limits = tomllib.loads((ROOT / LIMITS).read_text(encoding="utf-8"))
    for unit, found in sizes().items():
        for name, number in sorted(found.items()):
            limit = limits[unit].get(name)
            if limit is None:
                yield f"{name} has {number:,} {unit} and no limit: add one to [{unit}]"
            elif number > limit:
                yield (
                    f"{name} has {number:,} {unit}, {number - limit:,} more than its limit of "
                    f"{limit:,}: make it smaller, or raise the limit and say why in the commit"
                )
        for name in sorted(limits[unit].keys() - found.keys()):
            yield f"{name} is not there any more: remove its line from [{unit}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help=f"compare sizes with {LIMITS}")
    if parser.parse_args().check:
        passed = [f"{LIMITS}: {each}" for each in passed_limits()]
        sys.exit("\n".join(passed) or 0)
    print("| counted | before | at most | now |\n|---|---|---|---|")
    for what, before, goal, now in rows():
        print(f"| {what} | {before} | {goal} | {now} |")


if __name__ == "__main__":
    main()
