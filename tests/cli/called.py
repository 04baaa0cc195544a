"""A command, called in this process."""

import pytest

from halfstep._tools.cli import main


def called(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Return the exit code, and what was printed to stdout and stderr."""
    code = main([*map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
