"""A command, called in this process, and in an empty folder where that is imported."""

from pathlib import Path

import pytest

from halfstep._tools.cli import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def called(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Return the exit code, and what was printed to stdout and stderr."""
    code = main([*map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
