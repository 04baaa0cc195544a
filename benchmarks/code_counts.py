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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC, TESTS = ROOT / "src" / "halfstep", ROOT / "tests"
LIMITS = "limits.toml"


def python_files(*places: Path) -> Iterator[Path]:
    """Yield the Python files of folders, but for data, and single ones."""
    for place in places:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if file.suffix == ".py" and "corpus" not in file.parts:
                yield file


def texts(*folders: Path) -> list[str]:
    """Return the contents of the Python files in folders."""
    return [file.read_text(encoding="utf-8") for file in python_files(*folders)]


def size(*folders: Path) -> str:
    """Return the numbers of lines and of files."""
    found = texts(*folders)
    lines = sum(text.count("\n") for text in found)
    return f"{lines:,}; {len(found)}"


def contracts(*words: str) -> str:
    """Return how many contracts of import-linter with these words are broken, of how many."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith(words)]
    states = [re.search(r"\b(KEPT|BROKEN)\b", line) for line in lines]
    named = [state[1] for state in states if state]
    return f"{named.count('BROKEN')} of {len(named)} contracts broken"


def rows() -> Iterator[tuple[str, str, str, object]]:
    """Yield what is counted, before tools and core were parted, the goal, and now."""
    core = [folder for folder in SRC.iterdir() if folder.name != "_tools"]
    yield "lines; files in `src`", "51,769; 204", "45,000; 180", size(SRC)
    yield "of the core, without `_tools`", "21,637; 99", "19,000", size(*core)
    scaler = size(SRC / "_scaler", SRC / "_gradients")
    yield "of the scaler, with `_gradients`", "9,462; 35", "6,500; 26", scaler
    yield "of autocast", "5,226; 18", "", size(SRC / "_autocast")
    circles = contracts("No file knows")
    yield "circles, type checkers' imports included", "1, of 21 files", "0", circles
    reaches = contracts("Nobody reaches", "Each room imports", "Each tool imports")
    yield "imports behind the public files of a room", "0 of 12", "0", reaches
    yield "lines; files in `tests`, without corpora", "75,087; 315", "58,000", size(TESTS)
    words = sizes()["words"]
    yield "words of `docs` and README", "61,570", "36,000", f"{sum(words.values()):,}"


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
