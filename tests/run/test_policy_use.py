"""Rules for modules under a script's own autocast, and policies that never act."""

import pytest
import torch
from tests.run.conftest import Run
from torch import nn

from halfstep import Policy, preset
from halfstep._tools.run.stand_ins import replaced

BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
        x = self.body(x)
        return x.dtype, self.head(x).dtype


def call(model: nn.Module) -> tuple[torch.dtype, torch.dtype]:
    with torch.autocast("cpu", BF16):
        dtypes: tuple[torch.dtype, torch.dtype] = model(torch.ones(2, 4))
    return dtypes


def test_rules_for_modules_act_from_the_first_call_on() -> None:
    model = Net()
    with replaced(Policy.parse("torch; @head:fp32")) as use:
        assert [call(model), call(model)] == [(BF16, FP32)] * 2
        assert list(use.problems()) == []
    assert call(model) == (BF16, BF16)


def test_rules_go_to_the_first_model_that_has_such_modules() -> None:
    """A teacher, a tokenizer or a generator may be called before the model that is meant."""
    models = [nn.Sequential(nn.Linear(4, 4)), Net(), Net()]
    with replaced(Policy.parse("torch; @head:fp32; @body:fp32")) as use:
        with torch.autocast("cpu", BF16):
            models[0](torch.ones(2, 4))
        assert call(models[1]) == (FP32, FP32)
        assert call(models[2]) == (BF16, BF16)
        assert list(use.problems()) == []


def test_rules_name_modules_from_the_whole_on_that_calls_them() -> None:
    """As diagnoses name them: a method such as Lightning's training_step calls a part."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self) -> tuple[torch.dtype, torch.dtype]:
            return call(self.net)

    with replaced(Policy.parse("torch; @net.head:fp32")) as use:
        assert Whole().training_step() == (BF16, FP32)
        assert list(use.problems()) == []
    with replaced(Policy.parse("torch; @head:fp32")):
        assert Whole().training_step() == (BF16, FP32)


def test_a_model_that_is_compiled_has_rules_too() -> None:
    model = Net()
    with replaced(Policy.parse("torch; @head:fp32")):
        assert call(torch.compile(model, backend="eager")) == (BF16, FP32)  # type: ignore[arg-type]


def test_a_rule_that_names_no_module_breaks_nothing_and_is_reported() -> None:
    with replaced(Policy.parse("torch; @haed:fp32; @head:fp32")) as use:
        assert call(Net()) == (BF16, FP32)
        assert list(use.problems()) == [
            "the policy's rule @haed:fp32 never acted: no module of this Net is named like 'haed'; "
            "did you mean 'head'?"
        ]


def test_a_model_without_modules_is_said_to_have_none() -> None:
    with replaced(Policy.parse("torch; @head:fp32")) as use, torch.autocast("cpu", BF16):
        nn.Linear(4, 4)(torch.ones(2, 4))
        (said,) = use.problems()
    assert said.endswith("no module of this Linear is named like 'head'; it has none")


def test_without_a_call_of_a_model_rules_for_modules_never_act() -> None:
    with replaced(Policy.parse("torch; @head:fp32")) as use:
        with torch.autocast("cpu", BF16):
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert list(use.problems()) == [
            "the policy's rule @head:fp32 never acted: no model was called outside of a compiled "
            "function"
        ]


@pytest.mark.parametrize("name", ["standard", "torch"])
def test_a_policy_without_an_autocast_never_acts(name: str) -> None:
    with replaced(preset(name)) as use:
        with torch.autocast("cpu", BF16, enabled=False):
            Net()(torch.ones(2, 4))
        said = list(use.problems())
        assert [text.startswith("the policy standard never acted") for text in said] == (
            [True] if name == "standard" else []
        )
        torch.autocast("cpu", BF16)
        assert list(use.problems()) == []


LOOP = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16, enabled={enabled}):
        y = model(torch.ones(2, 4))
    print(y.dtype)
    y.float().square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("policy", "code", "told", "dtypes"),
    [
        (
            "torch; linear@1:fp32",
            0,
            "products with gradients ran in bfloat16 (50 %) and float32",
            [FP32] * 2,
        ),
        ("torch; linear@1:fp32; @nosuch:fp32", 1, "'nosuch'; its modules are 0, 1", [FP32]),
        ("torch; @late:fp32", 0, "no module of this Sequential is named like 'late'", [BF16] * 2),
    ],
)
def test_run_takes_rules_for_modules_without_amp(
    policy: str, code: int, told: str, dtypes: list[torch.dtype], halfstep_run: Run, tmp_path
) -> None:
    """A name that no module has is an error at once; a model may be called later, or never."""
    late = "import torch\nother = torch.nn.ModuleDict({'late': torch.nn.Linear(1, 1)})\n"
    (tmp_path / "train.py").write_text(late * ("late" in policy) + LOOP.format(enabled=True))
    done = halfstep_run("--policy", policy, "-o", "out", "train.py")
    assert (done.code, told in done.err) == (code, True), done.err
    assert done.out.split() == list(map(str, dtypes))
    assert (tmp_path / "out").exists() is (code == 0)


def test_a_name_of_no_module_is_an_error_where_amp_leaves_the_script_its_autocast(
    halfstep_run: Run, tmp_path
) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(enabled=True))
    done = halfstep_run("--amp", "bf16", "--policy", "torch; @nosuch:fp32", "train.py")
    assert (done.code, "no module of this Sequential is named like" in done.err) == (1, True)


def test_run_says_that_a_policy_never_acted(halfstep_run: Run, tmp_path) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(enabled=False))
    done = halfstep_run("--policy", "torch; @1:fp32", "-o", "out", "train.py")
    assert "halfstep: the policy torch; @1:fp32 never acted: the program used no torch" in done.err
    assert "never acted" in (tmp_path / "out" / "rank0.jsonl").read_text()
