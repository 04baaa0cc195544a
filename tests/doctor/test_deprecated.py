"""Deprecated names of PyTorch: found, and rewritten without a change of layout or meaning."""

from __future__ import annotations

import ast
import os
import warnings

import pytest
import torch

from halfstep._tools.cli import main
from halfstep._tools.doctor.deprecated import rewritten
from halfstep._tools.doctor.doctor import check_source

CASES = [
    ("with torch.cuda.amp.autocast(): x", 'with torch.amp.autocast("cuda"): x'),
    ("with torch.cpu.amp.autocast( ): x", 'with torch.amp.autocast("cpu" ): x'),
    ("torch.cuda.amp.autocast(on)", 'torch.amp.autocast("cuda", enabled=on)'),
    (
        "torch.cuda.amp.autocast(on, torch.bfloat16, cache_enabled=False)",
        'torch.amp.autocast("cuda", enabled=on, dtype=torch.bfloat16, cache_enabled=False)',
    ),
    ("torch.cuda.amp.autocast(**given)", 'torch.amp.autocast("cuda", **given)'),
    ("torch.cuda.amp.GradScaler(1024., 2.)", 'torch.amp.GradScaler("cuda", 1024., 2.)'),
    (
        "from torch.cuda.amp import autocast, GradScaler as S  # both\nS(); autocast()",
        'from torch.amp import autocast, GradScaler as S  # both\nS("cuda"); autocast("cuda")',
    ),
    (
        "from torch.cuda.amp.grad_scaler import GradScaler\ns: GradScaler = GradScaler()",
        'from torch.amp import GradScaler\ns: GradScaler = GradScaler("cuda")',
    ),
    (
        "from torch.cuda.amp import (\n    GradScaler,  # scales\n)\n"
        "GradScaler(\n    growth_interval=3,\n)",
        "from torch.amp import (\n    GradScaler,  # scales\n)\n"
        'GradScaler(\n    "cuda", growth_interval=3,\n)',
    ),
    (
        "from torch.cuda import amp\namp.autocast(False)",
        'from torch import amp\namp.autocast("cuda", enabled=False)',
    ),
    (
        "import torch.cuda.amp as mixed\nmixed.GradScaler()",
        'from torch import amp as mixed\nmixed.GradScaler("cuda")',
    ),
    (
        "@torch.cuda.amp.custom_fwd\ndef f(): pass",
        '@torch.amp.custom_fwd(device_type="cuda")\ndef f(): pass',
    ),
    (
        "from torch.cuda.amp import custom_fwd\n@custom_fwd(cast_inputs=torch.half)\ndef f(): pass",
        "from torch.amp import custom_fwd\n"
        '@custom_fwd(device_type="cuda", cast_inputs=torch.half)\ndef f(): pass',
    ),
    ("g = torch.cuda.amp.custom_bwd(f)", 'g = torch.amp.custom_bwd(f, device_type="cuda")'),
    (
        "from torch.cuda.amp import autocast, common\nautocast()",
        'from torch.amp import autocast\nfrom torch.cuda.amp import common\nautocast("cuda")',
    ),
    (
        "def f():\n\tfrom torch.cuda.amp import autocast\r\n\tautocast('ü', x)",
        "def f():\n\tfrom torch.amp import autocast\r\n\tautocast(\"cuda\", enabled='ü', dtype=x)",
    ),
    ("größe = torch.cuda.amp.GradScaler()  # ü", 'größe = torch.amp.GradScaler("cuda")  # ü'),
]
LEFT = [
    ("torch.cuda.amp.autocast(*given)", 1),
    ("partial(torch.cuda.amp.autocast, True)", 1),
    ("from torch.cuda.amp import autocast\ncontext = autocast if amp else nullcontext", 2),
    ("from torch.cuda.amp import GradScaler\nclass Mine(GradScaler): pass", 2),
    ("from torch.cuda.amp import *\nautocast()", 1),
    ("try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    autocast = None", 2),
    ("from torch.cuda import amp\namp.autocast(); amp.common.amp_definitely_not_available()", 1),
    ("import torch.cuda.amp as amp\namp.autocast(); f(amp)", 1),
    (
        "if cuda:\n    from torch.cuda.amp import autocast\nelse:\n"
        "    from torch.cpu.amp import autocast\nautocast()",
        2,
    ),
]


@pytest.mark.parametrize(("old", "new"), CASES)
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from torch.cuda.amp import autocast, custom_fwd\nautocast()",
            'from halfstep import autocast\nfrom torch.amp import custom_fwd\nautocast("cuda")',
        ),
        (
            "from torch.amp import GradScaler, autocast\nautocast('cuda'); GradScaler()",
            "from halfstep import GradScaler, autocast\nautocast('cuda'); GradScaler()",
        ),
        (
            "import torch\ntorch.autocast('cpu'); torch.cuda.amp.GradScaler()",
            "import halfstep\nimport torch\n"
            "halfstep.autocast('cpu'); halfstep.GradScaler(\"cuda\")",
        ),
        (
            "import halfstep\nimport torch\nfrom torch import amp\namp.autocast('cpu')",
            "import halfstep\nimport torch\nfrom torch import amp\nhalfstep.autocast('cpu')",
        ),
    ],
)
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
