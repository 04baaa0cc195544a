"""Deprecated names of PyTorch: found, and rewritten without a change of layout or meaning."""

from __future__ import annotations

import ast
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from halfstep._tools.cli import main
from halfstep._tools.doctor.deprecated import rewritten
from halfstep._tools.doctor.doctor import check_source

TEXT = (Path(__file__).parent / "deprecated.txt").read_text(encoding="utf-8")
BLOCKS = [block.strip("\n").split("\n", 1) for block in re.split(r"(?m)^== ", TEXT)[1:]]
LEFT = [(body, int(title.split()[-1])) for title, body in BLOCKS if title.startswith("left")]


def cases(kind: str) -> list[list[str]]:
    """Return programs, each with what becomes of it."""
    return [body.split("\n--\n") for title, body in BLOCKS if title == kind]


WITH_TABS = (
    "def f():\n\tfrom torch.cuda.amp import autocast\r\n\tautocast('ü', x)",
    "def f():\n\tfrom torch.amp import autocast\r\n\tautocast(\"cuda\", enabled='ü', dtype=x)",
)


@pytest.mark.parametrize(("old", "new"), [*cases("to torch"), WITH_TABS])
def test_a_name_is_rewritten(old: str, new: str) -> None:
    found = rewritten(old)
    assert found.text == new
    assert found.names
    assert not found.left
    ast.parse(new)
    assert rewritten(new).text == new
    assert not rewritten(new).names


@pytest.mark.parametrize(("text", "line"), LEFT)
def test_what_is_not_understood_stays(text: str, line: int) -> None:
    found = rewritten(text)
    assert found.text == text
    assert line in [at for at, _ in found.left]


def test_what_is_rewritten_does_the_same_without_a_warning() -> None:
    old = (
        "import torch\nfrom torch.cpu.amp import autocast, GradScaler\n"
        "scaler = GradScaler(512.)\nwith autocast(True, torch.bfloat16):\n"
        "    out = torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "with torch.cpu.amp.autocast(False):\n    off = torch.ones(2, 2) @ torch.ones(2, 2)\n"
    )
    before: dict[str, object] = {}
    with pytest.warns(FutureWarning):
        exec(old, before)
    after: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(rewritten(old).text, after)
    for name, dtype in (("out", torch.bfloat16), ("off", torch.float32)):
        assert [names[name].dtype for names in (before, after)] == [dtype, dtype]  # type: ignore[attr-defined]
    scales = [names["scaler"].get_scale() for names in (before, after)]  # type: ignore[attr-defined]
    assert scales == [512.0, 512.0]


@pytest.mark.parametrize(("old", "new"), cases("to halfstep"))
def test_to_halfstep(old: str, new: str) -> None:
    assert rewritten(old, "halfstep").text == new
    assert rewritten(new, "halfstep").text == new


def test_a_file_has_one_finding() -> None:
    imports = "import torch\nfrom torch.cuda.amp import autocast\n"
    source = imports + "autocast()\ntorch.cuda.amp.GradScaler()\n"
    (found,) = check_source(source)
    assert (found.id, found.severity, found.line) == ("deprecated-amp", "notice", 2)
    assert found.names == ("torch.cuda.amp.autocast", "torch.cuda.amp.GradScaler")


def test_the_command_writes_and_shows_the_changes(tmp_path, capsys):
    path = tmp_path / "train.py"
    content = (
        "# -*- coding: latin-1 -*-\r\nfrom torch.cuda.amp import autocast\r\nautocast('ü')\r\n"
    )
    path.write_bytes(content.encode("latin-1"))
    path.chmod(0o755)
    assert main(["doctor", "--diff", str(path)]) == 1
    assert path.read_bytes() == content.encode("latin-1")
    shown = capsys.readouterr()
    assert "-from torch.cuda.amp import autocast" in shown.out
    assert shown.err == "1 file to change\n"
    assert main(["doctor", "--fix", str(path)]) == 0
    assert "+from torch.amp import autocast" in capsys.readouterr().out
    new = content.replace("torch.cuda.amp", "torch.amp").replace("'ü'", "\"cuda\", enabled='ü'")
    assert path.read_bytes() == new.encode("latin-1")
    assert path.stat().st_mode & 0o777 == 0o755
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]
    assert main(["doctor", "--diff", str(path)]) == 0
    assert capsys.readouterr().err == "0 files to change\n"


def test_the_names_of_a_line_are_in_its_order():
    names = ("GradScaler", "custom_bwd", "autocast", "custom_fwd")
    line = f"from torch.cuda.amp import {', '.join(names)}\n"
    found = [(f"torch.cuda.amp.{name}", number) for number in range(1, 6) for name in names]
    assert list(rewritten(line * 5).names) == found


def test_a_file_with_a_name_like_that_of_a_copy_stays(tmp_path):
    path, other = tmp_path / "train.py", tmp_path / f".train.py.{os.getpid()}"
    path.write_text("import torch\ntorch.cuda.amp.GradScaler()\n")
    other.write_text("of another container")
    assert main(["doctor", "--fix", str(path)]) == 0
    assert "torch.amp.GradScaler" in path.read_text()
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_the_command_names_what_it_leaves(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("from torch.cuda.amp import *\n")
    assert main(["doctor", "--fix", "--to", "halfstep", str(path)]) == 0
    assert f"{path}:1: left as it is: the names of" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--fix", "--diff"])
def test_the_command_needs_a_script_in_python(option, tmp_path, capsys):
    assert main(["doctor", option]) == 2
    assert f"{option} leaves nothing to do: name a script" in capsys.readouterr().err
    path = tmp_path / "train.py"
    path.write_text("with\n")
    assert main(["doctor", option, str(path)]) == 2
    assert f"{path}:1: not Python" in capsys.readouterr().err
