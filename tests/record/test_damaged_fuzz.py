"""Damaged records: what is damaged is counted, named and left out, and nothing ends in a traceback.

``HALFSTEP_FUZZ=6000`` tries so many files.
"""

import contextlib
import json
import os
import random

import pytest
from tests.report import records

from halfstep._tools.record.files import line_of
from halfstep._tools.record.read import read_run
from halfstep._tools.report import text
from halfstep._tools.report.compare_runs import compare_runs
from halfstep._tools.report.page import render, render_comparison
from halfstep._tools.report.summarize import summarize
from halfstep.errors import RecordError

pytestmark = pytest.mark.slow

NUM_FILES = int(os.environ.get("HALFSTEP_FUZZ", "300"))
NUM_PARTS = 4
LAYERS = ("embed", "head")
DEEP = "@deep@"
VALUES = (
    None,
    True,
    0,
    -1,
    0.5,
    -0.0,
    1e-320,
    5e-324,
    1e308,
    2**31,
    2**53,
    2**64,
    10**400,
    -(10**400),
    10**5000,
    "",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "12",
    "\x1b]0;x\x07\u202e",
    "\udcff",
    "x" * 5000,
    [],
    {},
    [None],
    [[1]],
    {"a": 1},
    DEEP,
)
NAMES = ("rank².jsonl", "rank٣.jsonl", "rank01.jsonl", "rank-1.jsonl", "rank.jsonl", "rank1.jsonl")


def events(rng):
    scale = rng.choice((1.0, 1024.0))
    for number in range(1, 7):
        yield (records.skip if number == 3 else records.step)(number)
        if number in (1, 5):
            rows = list(records.layers(LAYERS))
            rows[0] |= {"dtype": "bfloat16", "updates": 900, "lost_updates": 90}
            yield records.sample(number, rows, scale)
    yield records.culprits(3, "head")
    yield records.diagnosis(3)
    yield records.note(4, "a note")


def whole(rng):
    """Return the events of a record, some of two segments."""
    first = [records.header(), {"event": "device", "step": 1, "device": "cpu", "machine": "x"}]
    found = [
        *first,
        records.model_event(LAYERS),
        records.policy(),
        *events(rng),
        records.end(9.0, 6),
    ]
    if rng.random() < 0.3:
        found += [records.header(started="2026-01-02T00:00:00+00:00"), *events(rng)]
    return found


def places(value):
    """Yield all (container, key) inside of a value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def to_json(value, rng):
    deep = rng.choice(("[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "[" * 900))
    return json.dumps(value).replace(f'"{DEEP}"', deep).encode()


def damaged_line(event, rng):
    """Return a line in which a value or some bytes are others."""
    event = json.loads(line_of(event))
    match rng.randrange(6):
        case 0 | 1 | 2:
            container, key = rng.choice(list(places(event)))
            if isinstance(container, dict) and rng.random() < 0.2:
                del container[key]
            else:
                container[key] = rng.choice(VALUES)
            try:
                return line_of(event) if rng.random() < 0.5 else to_json(event, rng) + b"\n"
            except ValueError:  # too large to be written
                return b"{}\n"
        case 3:
            line = bytearray(line_of(event))
            for _ in range(rng.choice((1, 1, 9))):
                line[rng.randrange(len(line))] = rng.randrange(256)
            return bytes(line)
        case 4:
            line = line_of(event)
            return line[: rng.randrange(len(line))] + rng.choice((b"", b"\n"))
        case _:
            return rng.choice(
                (b"\xff\xfe\x00\n", b"NaN\n", b"[]\n", b"5\n", b'{"event":7}\n', b"\r\n")
            )


def write_damaged(folder, rng):
    folder.mkdir()
    for rank in range(rng.choice((1, 1, 2))):
        lines = [line_of(event) for event in whole(rng)]
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(lines))
            match rng.randrange(8):
                case 0:
                    lines.insert(rng.randrange(len(lines)), lines[at])
                case 1:
                    lines.insert(rng.randrange(len(lines)), lines.pop(at))
                case 2:
                    del lines[at]
                case _:
                    try:
                        event = json.loads(lines[at])
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(event, dict) and event:
                        lines[at] = damaged_line(event, rng)
        data = b"".join(lines)
        (folder / f"rank{rank}.jsonl").write_bytes(rng.choice((data, data, data, data[:-9], b"")))
    if rng.random() < 0.2:
        (folder / rng.choice(NAMES)).write_bytes(b"{}\n")
    if rng.random() < 0.1:
        (folder / "rank7.jsonl").mkdir()


def look(folder):
    """Make everything of a record; RecordError is what it may raise."""
    run = read_run(folder)
    summary = summarize(run)
    render(summary, run).encode(errors="replace")
    json.dumps(text.summary_json(summary), allow_nan=False)
    text.summary_text(summary)
    comparison = compare_runs(summary, summary)
    text.comparison_text(comparison)
    render_comparison(comparison, [run, run])
    return run


@pytest.mark.timeout(0 if NUM_FILES > 300 else 300)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_damaged_files(tmp_path, part):
    for number in range(part, NUM_FILES, NUM_PARTS):
        folder = tmp_path / str(number)
        write_damaged(folder, random.Random(number))
        try:
            with contextlib.suppress(RecordError):
                look(folder)
        except Exception as error:
            raise AssertionError(f"file {number} of the fuzz test") from error
