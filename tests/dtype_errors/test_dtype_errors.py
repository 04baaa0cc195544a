"""Errors about dtypes are explained from the frames of their traceback."""

from pathlib import Path

import pytest
import torch
from tests import forked
from tests.device import DEVICE
from tests.dtype_errors import dtype_programs as hostile
from tests.dtype_errors.dtype_programs import runs
from torch import nn

import halfstep
from halfstep._tools.dtype_errors.dtype_error import edited_lines, explain
from halfstep._tools.user_code import tree_of

BEGIN = """
import torch
import torch.nn.functional as F
from torch import nn

import halfstep

x = torch.randn(2, 4)
half = x.half()
"""


def failing(source: str, file: Path) -> BaseException:
    file.write_text(BEGIN + source)
    with pytest.raises((RuntimeError, ValueError, IndexError)) as caught:
        runs(file)
    return caught.value


SPREAD = [name for name, program in hostile.NEWER.items() if not program.is_missed][::3]


@pytest.mark.parametrize("name", [*hostile.PLAIN, *hostile.FIRST, *SPREAD])
def test_hostile_programs(name: str, tmp_path: Path) -> None:
    judged = hostile.judge({**hostile.PLAIN, **hostile.ALL}[name], tmp_path)
    assert (judged.has_line, judged.missing) == (True, [])
    assert judged.is_cured is not False, judged.explanation


@pytest.mark.parametrize("name", [*hostile.REST, *[*hostile.WHOLE][::3]])
def test_the_first_cure_makes_the_rest_run(name: str, tmp_path: Path) -> None:
    judged = hostile.judge((hostile.REST | hostile.WHOLE)[name], tmp_path)
    assert judged.is_right, judged.explanation
    assert judged.does_first, judged.explanation


def test_inside_of_a_package_the_line_is_the_last_of_the_user(tmp_path: Path) -> None:
    judged = hostile.judge(hostile.LIBRARIES["LoRA of peft"], tmp_path)
    assert judged.is_right
    assert "\nwhich calls layer.py:" in judged.explanation
    assert "\n> result = self.base_layer(x" in judged.explanation


UNTRIED = "this call runs (the rest of the line was not tried)"
ORIGINS = {
    "the later of two": ("h = x\nh = h.half()\nmodel(h)", "h = h.half()"),
    "one of two branches": (
        "h = x.half()\nif len(h) == 2:\n    h = h.relu()\nmodel(h)",
        "h = x.half(), or of line 13: h = h.relu()",
    ),
    "in the same branch": (
        "if len(x) == 3:\n    h = x\nelse:\n    h = x.half()\n    model(h)",
        "h = x.half()",
    ),
    "not a later line": ("h = x.half()\nmodel(h)\nh = half", "h = x.half()"),
    "the next turn of a loop": (
        "h = x.half()\nfor _ in range(2):\n    model(h)\n    h = x + 1",
        "h = x.half(), or of line 14: h = x + 1",
    ),
    "what is changed in place": (
        "h = x.half()\nh *= 2\nmodel(h)",
        "h = x.half(), or of line 12: h *= 2",
    ),
    "another name": ("h = x.half()\ng = h\nmodel(g)", "h = x.half()"),
    "a view": ('d = {"h": half.T.clone()}\nmodel(d["h"].t())', "d = {'h': half.T.clone()}"),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_the_line_of_an_assignment(name: str, tmp_path: Path) -> None:
    source, text = ORIGINS[name]
    found = explain(failing("model = nn.Linear(4, 2)\n" + source, tmp_path / "train.py"))
    origin = next(o.origin for o in found.operands if o.tensor.dtype is torch.float16)
    assert origin.partition(": ")[2] == text


def test_a_tensor_that_the_traceback_does_not_show(tmp_path: Path) -> None:
    source = (
        "parts = nn.Sequential(nn.Linear(4, 4))\n"
        "with warnings.catch_warnings(action='ignore'):\n"
        "    model = torch.ao.quantization.quantize_dynamic(parts, {nn.Linear})\n"
        "model(half)"
    )
    found = explain(failing("import warnings\n" + source, tmp_path / "train.py"))
    assert [*map(str, found.operands)] == ["half: float16 [2, 4], of line 9: half = x.half()"]
    assert found.notes == ("a tensor that the traceback does not show is float32",)
    assert "\nmodel(half.to(torch.float32))" in str(found).replace("\n  ", "\n")


@pytest.mark.parametrize(
    ("lines", "ran"),
    [
        (
            "h = model(data.x)\n" * 6 + "h = model(half @ half.T.float())",
            "it runs (then line 15 fails)",
        ),
        ("h = model(data.x), half @ unknown(half).T.float()", UNTRIED),
        ("h = [model(data.x), *map(model, [half])]", UNTRIED),
        ("h = model(data.x)\ng = unknown(h)", "it runs (line 15 was not tried)"),
        ("h = model(data.x)\nprint(unknown(h))", "it runs"),
    ],
)
def test_what_has_run_with_a_change(lines: str, ran: str, tmp_path: Path) -> None:
    begin = "from functools import partial\nmodel, data = nn.Linear(4, 4), nn.Module()\n"
    source = f"{begin}unknown = partial(torch.mul, 2)\ndata.x = half\n{lines}"
    found = explain(failing(source, tmp_path / "train.py"))
    assert f"tried, and {ran}, in place of train.py:14:\n" in str(found)


def test_a_changed_line_that_fails_later_is_said_not_to_be_tried(
    tmp_path: Path,
) -> None:
    source = "model, more = nn.Linear(4, 4), half + 1\nh = model(half)\ng = model(more).view(3)"
    text = str(explain(failing(source, tmp_path / "train.py")))
    assert "it runs (the change of line 12 was not tried), in place of train.py:11 and " in text


def test_nothing_is_tried_with_other_tensors_than_those_that_failed(tmp_path: Path) -> None:
    source = (
        "model = nn.Linear(4, 2)\n"
        "params = {n: p.detach().half() for n, p in model.named_parameters()}\n"
        "torch.func.functional_call(model, params, (x,))"
    )
    found = explain(failing(source, tmp_path / "train.py"))
    assert [o.name for o in found.operands] == ["params['weight']", "params['bias']", "x"]
    assert found.cures == ()


@pytest.mark.parametrize(
    ("call", "number", "end", "rule"),
    [
        ("masked_fill(x > 0, {})", "-1e9", "min", "masked_fill"),
        ("masked_fill(x > 0, {})", "torch.finfo(torch.float32).min", "min", "masked_fill"),
        ("masked_fill_(x > 0, {})", "70000", "max", None),
        ("clamp(max={})", "70000", "max", "clamp"),
        ("new_full((2,), {})", "-1e9", "min", "new_full"),
    ],
)
def test_a_number_that_does_not_fit(call, number, end, rule, tmp_path):
    source = f"with halfstep.autocast('cpu', torch.float16):\n    half.{call.format(number)}"
    found = explain(failing(source, tmp_path / "train.py"))
    number = "-1000000000.0" if number == "-1e9" else number
    assert found.notes == (
        f"{number} does not fit: float16 ends at 65,504. torch.finfo(half.dtype).{end} does",
    )
    policy = f'policy="standard; {rule}:fp32"'
    assert (policy in str(found)) is (rule is not None)


@pytest.mark.parametrize(
    ("call", "operand", "cure"),
    [
        ("F.cross_entropy(x, {})", "ids.double()", "{}.long()"),
        ("F.nll_loss(x, {})", "ids.int()", "{}.long()"),
        ("F.cross_entropy(x, {})", "ids / 2", None),  # is not whole: a target of another loss
        ("F.cross_entropy(x, {})", "ids[:, None]", "{}.squeeze(1)"),
        ("F.cross_entropy(x, {})", "F.one_hot(ids, 4)", "{}.to(torch.float32)"),
        ("F.binary_cross_entropy_with_logits(x, {})", "x > 0", "({}).to(torch.float32)"),
        ("x - {}", "x.bool()", "{}.to(torch.float32)"),
        ("F.embedding({}, x)", "ids.float()", "{}.long()"),
        ("x[{}]", "ids.short()", "{}.long()"),
        ("x[{}] = 1.0", "ids.float()", "{}.long()"),
        ("x.gather(1, {})", "ids.float()[:, None]", "{}.long()"),
        ("x.masked_fill({}, 0.0)", "ids[:, None]", "{}.bool()"),
        ("{}.mean()", "ids", "{}.to(torch.float32)"),
        ("x[x == x] = {}", "torch.arange(x.numel())", "{}.to(torch.float32)"),
        ("x.index_add_(0, ids, {})", "torch.ones_like(x).long()", "{}.to(torch.float32)"),
        ("x.scatter_add_(1, ids[None], {})", "torch.ones_like(ids[None])", "{}.to(torch.float32)"),
    ],
)
def test_labels_indices_and_masks_have_a_dtype_of_their_own(call, operand, cure, tmp_path):
    source = f"ids = torch.tensor([0, 1])\n{call.format(operand)}"
    found = explain(failing(source, tmp_path / "train.py"))
    texts = [edit.text for each in found.cures for edit in each.edits]
    assert texts == [call.format(cure.format(operand))] if cure else not texts


def test_no_program_becomes_a_miss() -> None:
    assert len(hostile.ALL) == 104
    assert sum(program.is_missed for program in hostile.ALL.values()) <= 6


def test_other_errors_are_not_explained(tmp_path: Path) -> None:
    assert explain(failing("torch.mm(x, x)", tmp_path / "train.py")) is None
    assert explain(RuntimeError("mat1 and mat2 must have the same dtype")) is None
    assert explain(KeyboardInterrupt()) is None


def test_under_a_default_device(tmp_path: Path) -> None:
    """PyTorch's mode stands between the user's call and the op."""
    with torch.device(DEVICE):
        found = explain(failing("torch.nn.functional.linear(x, half)", tmp_path / "train.py"))
    assert [each.name for each in found.operands] == ["x", "half"]
    assert found.cures


@pytest.mark.parametrize("call", ["out.addmm_(x, half.T)", "torch.mm(x, half.T, out=out)"])
def test_nothing_is_written_by_a_try(call: str, tmp_path: Path) -> None:
    found = explain(failing(f"out = torch.zeros(2, 2)\n{call}", tmp_path / "train.py"))
    assert found.cures
    out = next(each.tensor for each in found.operands if each.name == "out")
    assert out.eq(0).all()


@pytest.mark.parametrize("loop", [False, True])
def test_the_error_of_a_diagnosed_step_has_it_as_a_note(loop: bool) -> None:
    model, x = nn.Linear(4, 2).half(), torch.ones(2, 4)

    def step() -> None:
        model(x).sum().backward()

    def steps() -> None:
        with halfstep.diagnose(halfstep.GradScaler("cpu"), model=model):
            step()

    run = steps if loop else lambda: halfstep.diagnose(step, model=model)
    with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
        run()
    [note] = caught.value.__notes__
    assert note.startswith("halfstep: the tensors that the error is about, at test_dtype_errors.py")
    assert "> model(x).sum().backward()" in note
    assert "  x: float32 [2, 4], of line " in note
    assert "  weight of Linear: float16 [2, 4], a parameter" in note
    assert "\n  model(x.to(torch.float16)).sum().backward()" in note
    assert explain(caught.value) is None  # halfstep run does not tell it again


def test_an_object_that_cannot_be_read_leaves_the_error_as_it_is(tmp_path: Path) -> None:
    source = """
class Broken:
    def __getattribute__(self, name):
        raise KeyError(name)

broken = Broken()
nn.Linear(4, 2)(half)
"""
    error = failing(source, tmp_path / "train.py")
    explain(error)
    assert "same dtype" in str(error)


def test_other_errors_of_a_diagnosed_step_have_no_note() -> None:
    with pytest.raises(ZeroDivisionError) as caught, halfstep.diagnose(halfstep.GradScaler("cpu")):
        print(1 / 0)
    assert not hasattr(caught.value, "__notes__")


def test_a_run_tells_it_after_the_traceback(tmp_path: Path) -> None:
    program = hostile.PLAIN["a head that was not converted"]
    (tmp_path / "train.py").write_text(program.source)
    alone = forked.python("train.py", cwd=tmp_path)
    done = forked.python("-m", "halfstep", "run", "train.py", cwd=tmp_path)
    assert done.code == alone.code == 1
    traceback, told = done.err.split("halfstep: ", 1)
    assert traceback.splitlines()[-3:] == alone.err.splitlines()[-3:]
    assert told.startswith("the tensors that the error is about, at train.py:22:\n")
    assert "tried, and it runs, in place of train.py:22:\n  return self.head(h.to(" in told
    quiet = forked.python("-m", "halfstep", "run", "-q", "train.py", cwd=tmp_path)
    assert quiet.err == traceback


def test_a_run_offers_halfsteps_autocast_in_place_of_the_scripts(tmp_path: Path) -> None:
    program = hostile.REST["experts and a shared one"]
    (tmp_path / "train.py").write_text(program.source)
    told = forked.python("-m", "halfstep", "run", "train.py", cwd=tmp_path).err
    [cure] = program.cures
    assert f"\n  {cure}" in told


def test_a_change_imports_the_halfstep_that_it_names(tmp_path: Path) -> None:
    (file := tmp_path / "train.py").write_text("import torch\nx = torch\n")
    edits = {tree_of(str(file)).root.body[1].value: "halfstep.f({})"}
    texts = [edit.text for edit in edited_lines(edits, [str(file)])]
    assert texts == ["import halfstep\nimport torch", "x = halfstep.f(torch)"]
