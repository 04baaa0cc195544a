"""Islands as code that needs PyTorch alone: it is run where halfstep cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep
from halfstep import Policy

MODEL = """
import collections
import torch
from torch import nn

Pair = collections.namedtuple("Pair", ["first", "rest"])


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, pair, *, scale):
        large = self.proj(pair.first) * 1e5 * scale
        return Pair(large / large.norm(), {"mask": pair.rest["mask"]})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.squares, self.head = nn.Linear(8, 8), Squares(), nn.Linear(8, 2)

    def forward(self, x):
        pair = Pair(self.first(x) + 8, {"mask": torch.ones(1, dtype=torch.long)})
        pair = self.squares(pair, scale=torch.ones(1, dtype=pair.first.dtype))
        return self.head(pair.first)


torch.manual_seed(0)
model, x = Net(), torch.randn(4, 8)
"""

UNDER_AUTOCAST = """
with torch.autocast("cpu", torch.float16):
    result = model(x)
torch.save(result, path)
"""

IN_HALF = """
result = model(x.half())
torch.save(result, path)
"""

WITHOUT_HALFSTEP = """
import sys
path = sys.argv[1]
sys.modules["halfstep"] = None
"""


def run_script(path: Path, *parts: str) -> torch.Tensor:
    script = path / "script.py"
    script.write_text("\n".join((WITHOUT_HALFSTEP, *parts)))
    found = path / "result.pt"
    subprocess.run([sys.executable, str(script), str(found)], check=True, timeout=120)
    result: torch.Tensor = torch.load(found)
    return result


def net() -> tuple[nn.Module, torch.Tensor]:
    names: dict[str, object] = {}
    exec(MODEL, names)
    model, x = names["model"], names["x"]
    assert isinstance(model, nn.Module)
    assert isinstance(x, torch.Tensor)
    return model, x


def test_the_code_does_what_the_policy_does(tmp_path: Path) -> None:
    model, x = net()
    policy = Policy.parse("torch; @squares:fp32")
    code = policy.export(model)
    assert "halfstep" not in code
    with halfstep.autocast("cpu", torch.float16, policy=policy, module=model), torch.no_grad():
        expected = model(x)
    assert expected.isfinite().all()
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert not model(x).isfinite().all()
    assert torch.equal(run_script(tmp_path, MODEL, code, UNDER_AUTOCAST).detach(), expected)


def test_the_code_cures_a_half_model(tmp_path: Path) -> None:
    model, x = net()
    code = Policy.parse("torch; @squares:fp32").export(model)
    result = run_script(tmp_path, MODEL, "model.half()", code, IN_HALF)
    assert result.dtype is torch.float16
    assert result.isfinite().all()
    torch.testing.assert_close(result.float(), model(x), rtol=0.01, atol=0.01)
    assert not model.half()(x.half()).isfinite().all()


def test_rules_for_ops_of_modules_keep_the_whole_module() -> None:
    model, _ = net()
    code = Policy.parse("standard; mul@squares:fp32; @head:fp32").export(model)
    *_, first, second = code.splitlines()
    assert first == (
        "run_in_float32(model.get_submodule('squares'))  # instead of mul@squares:fp32"
    )
    assert second == "run_in_float32(model.get_submodule('head'))"


def test_modules_inside_of_an_island_are_a_part_of_it() -> None:
    model, _ = net()
    code = Policy.parse("torch; @squares*:fp32").export(model)
    assert code.count("run_in_float32(model") == 1


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("standard; mul:fp32", "keeps no module in float32"),
        ("standard; mul@head:lower", "'mul@head:lower' cannot be exported"),
        ("standard; @haed:fp32", "did you mean 'head'"),
    ],
)
def test_what_cannot_be_exported_is_said(policy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy.parse(policy).export(net()[0])
