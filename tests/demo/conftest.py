"""One demo with the smallest model, run once for all tests that only look at what it left."""

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from halfstep._demo.demo import run_demo
from halfstep._demo.train import DemoSettings

STEPS = 8


@dataclass(frozen=True)
class Finished:
    output: Path
    printed: str


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    output = tmp_path_factory.mktemp("demo") / "made" / "by-the-demo"
    stream = io.StringIO()
    console = Console(file=stream, width=100)
    assert run_demo(DemoSettings(size="tiny", steps=STEPS), output, console) is True
    return Finished(output, stream.getvalue())
