"""Progress on a terminal."""

import io
import sys

import pytest
from tests.training import batches
from torch import nn

from halfstep import tune


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_each_measurement_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    tune(nn.Linear(8, 4), batches(1, 4, 8), None)
    assert "0 measured: batch 1 of 1 with nothing in fp32" in terminal.getvalue()


def test_elsewhere_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", text := io.StringIO())
    tune(nn.Linear(8, 4), batches(1, 4, 8), None)
    assert text.getvalue() == ""
