"""``halfstep run`` and Python alone, in processes of their own; so all tests here are slow."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests import forked
from tests.forked import Done

Run = Callable[..., Done]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test of this folder, and only these: pytest asks the conftest.py beside them."""
    item.add_marker("slow")


@pytest.fixture
def halfstep_run(tmp_path: Path) -> Run:
    """Returns a function that does what ``halfstep run ARGUMENTS`` does in ``tmp_path``."""
    return partial(forked.python, "-m", "halfstep", "run", cwd=tmp_path)


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Returns a function that runs ``python ARGUMENTS`` in ``tmp_path``."""

    def call(*arguments: object) -> Done:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return call
