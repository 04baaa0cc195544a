"""Changes of the user's source, as they would be pasted."""

import ast
import linecache
from pathlib import Path

import pytest

from halfstep._tools.source import Source

CASES = {
    "torch has another name": (
        "import torch as th\ny = f(x)\n",
        [("x", "{}.to(torch.half)")],
        "import torch as th\ny = f(x.to(th.half))\n",
    ),
    "torch is not imported": (
        "from __future__ import annotations\nfrom data import x\ny = x\n",
        [("x", "F.relu({})")],
        "from __future__ import annotations\nimport torch\nfrom data import x\n"
        "y = torch.nn.functional.relu(x)\n",
    ),
    "what does not change is as it was written": (
        "import torch\ny = f(x['a'], 1e-9, {}) + g(x)\n",
        [("f(x['a'], 1e-09, {})", "{}.to(torch.half)")],
        "import torch\ny = f(x['a'], 1e-9, {}).to(torch.half) + g(x)\n",
    ),
    "an operation over lines": (
        "import torch\ny = (a +\n     b) * 2\n",
        [("a + b", "{}.float()")],
        "import torch\ny = (a + b).float() * 2\n",
    ),
    "a loop within a context, and a part of it": (
        "import torch\nif x:\n    for i in x:\n        y = f(\n            a)\n",
        [
            ("for i in x:\n    y = f(a)", 'with torch.autocast("cpu"):\n    {}'),
            ("a", "{}.float()"),
        ],
        'import torch\nif x:\n    with torch.autocast("cpu"):\n        for i in x:\n'
        "            y = f(\n                a.float())\n",
    ),
    "lines before and after": (
        "y = f(x)\nz = y\n",
        [("y = f(x)", "a = 1\n{}"), ("y = f(x)", "{}\ny = -y"), ("x", "-{}")],
        "a = 1\ny = f(-x)\ny = -y\nz = y\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_changes(name: str, tmp_path: Path) -> None:
    before, texts, after = CASES[name]
    assert pasted(before, texts, tmp_path / "train.py") == after


@pytest.mark.parametrize(
    ("before", "text"), [("y = x\n", "{}.to(torch.half)"), ("if x: y = 1\n", "with a:\n    {}")]
)
def test_what_cannot_be_pasted(before: str, text: str, tmp_path: Path) -> None:
    at = "x" if "torch" in text else "y = 1"
    assert pasted(before, [(at, text)], tmp_path / "train.py") is None


def pasted(before: str, texts: list[tuple[str, str]], file: Path) -> str | None:
    """Return a program with texts in place of nodes; None if that is not possible."""
    file.write_text(before)
    linecache.checkcache(str(file))
    source, lines = Source(str(file)), before.splitlines()
    nodes = {ast.unparse(node): node for node in source.tree.parents if hasattr(node, "lineno")}
    are_put = [source.put(nodes[of], text) for of, text in texts]
    edits = source.edited()
    if not all(are_put) or edits is None:
        return None
    for edit in reversed(edits):
        lines[edit.first - 1 : edit.last] = edit.text.split("\n")
    return "\n".join(lines) + "\n"
