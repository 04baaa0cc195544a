import inspect
import re
from pathlib import Path

from halfstep._demo.train import training_loop

ROOT = Path(__file__).parents[2]


def test_the_loop_in_the_docs_is_the_one_that_runs():
    """Between the markers ``<!-- loop: begin -->`` and ``<!-- loop: end -->``."""
    text = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- loop: begin -->\n```python\n(.*?)```\n<!-- loop: end -->", text, re.S)
    assert shown == [inspect.getsource(training_loop)]


def test_the_loop_is_short():
    assert len(inspect.getsource(training_loop).splitlines()) < 25
