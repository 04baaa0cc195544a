"""The examples in docstrings and in docs/scaler.md run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["state", "scaler"])
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"halfstep.scaling.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_loop_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "scaler.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(block.replace("from halfstep import", "from halfstep.scaling import"), {})
