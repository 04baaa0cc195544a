"""Sentences on a terminal: wrapped, in color; elsewhere a line each."""

import re
from io import StringIO

import pytest

from halfstep._common.text import did_you_mean, tell

LONG = "warning: train.py:3: " + "word " * 30 + "end [id]\n  bad: " + "word " * 9 + "end"


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def of_forty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def told(text: str, stream: StringIO) -> str:
    tell(text, stream)
    return stream.getvalue()


def test_elsewhere_a_sentence_is_one_line() -> None:
    assert told(LONG, StringIO()) == LONG + "\n"


def test_on_a_terminal_sentences_are_wrapped_under_themselves() -> None:
    lines = re.sub(r"\x1b\[\d+m", "", told(LONG, Terminal())).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("warning: train.py:3: word")
    assert lines[1].startswith("  word")
    assert " ".join(" ".join(lines).split()) == " ".join(LONG.split())


def test_other_lines_stay_as_they_are() -> None:
    """Tables, and cures to paste."""
    table = (
        "    cure: " + "code " * 20 + "\n" + "name" + " " * 60 + "1.0\n    code(" + "x, " * 40 + ")"
    )
    assert told(table, Terminal()) == table + "\n"


@pytest.mark.parametrize(
    ("severity", "color"), [("bad", 31), ("warning", 33), ("notice", 36), ("good", 32)]
)
def test_the_severity_has_a_color(severity, color, monkeypatch):
    assert (
        told(f"{severity}: bad good", Terminal()) == f"\x1b[{color}m{severity}\x1b[0m: bad good\n"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert told(f"{severity}: bad good", Terminal()) == f"{severity}: bad good\n"


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert told("bad: \x1b[2J", Terminal()) == "\x1b[31mbad\x1b[0m: \\x1b[2J\n"


def test_an_option_is_meant_once() -> None:
    options = ["--output", "--output", "--help"]
    assert did_you_mean("--outptu", options) == "; did you mean '--output'?"


def test_a_program_may_replace_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    assert told("a line", StringIO()) == "a line\n"
