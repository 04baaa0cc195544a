"""The texts of cures: what is told is the statement as it is to stand in the file."""

from __future__ import annotations

import linecache
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnose.kinds.judged import run_file
from torch import nn

import halfstep
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.diagnose.edits import OF_POINTS

HEAD = """\
import math
import torch
import torch.nn.functional as F
from torch import nn
import halfstep

zero, swap = torch.zeros(4, requires_grad=True), torch.eye(2).flip(0).requires_grad_()
rows, flow = torch.zeros(3, 4, requires_grad=True), swap.detach().tril().add(swap).requires_grad_()
"""


def diagnosed(body: str, folder: Path, head: str = "") -> Diagnosis:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    source = f"{HEAD}{head}\ndef step():\n{lines}\n    loss.backward()\n"
    found: Diagnosis = halfstep.diagnose(run_file(source, folder / "a.py")["step"])
    return found


@pytest.mark.parametrize(
    ("statement", "edited"),
    [
        ("loss = torch.log(zero).sum()", "loss = torch.log(zero.clamp_min(1e-06)).sum()"),
        ("loss = zero.log().sum()", "loss = zero.clamp_min(1e-06).log().sum()"),
        ("loss = (zero * 2).log().sum()", "loss = (zero * 2).clamp_min(1e-06).log().sum()"),
        ("loss = torch.log(zero * 2).sum()", "loss = torch.log((zero * 2).clamp_min(1e-06)).sum()"),
        ("loss = (1 / zero).sum()", "loss = (1 / zero.clamp_min(1e-06)).sum()"),
        ("loss = (zero / zero).sum()", "loss = (zero / zero.clamp_min(1e-06)).sum()"),
        ("loss = zero.sum() / 0", "loss = zero.sum() / max(0, 1)"),
        (
            "loss = torch.cat([zero, zero.masked_fill(zero == 0, math.inf)]).softmax(0)[0]",
            "loss = torch.cat([zero, zero.masked_fill(zero == 0, math.inf)])"
            ".clamp(-10000.0, 10000.0).softmax(0)[0]",
        ),
        ("loss = torch.sqrt(zero).sum()", "loss = torch.sqrt(zero + 1e-06).sum()"),
        ("loss = (zero - 0).sqrt().sum()", "loss = (zero - 0 + 1e-06).sqrt().sum()"),
        ("loss = zero.sqrt().sum()  # why", "loss = (zero + 1e-06).sqrt().sum()  # why"),
        (
            "loss = F.normalize(rows, dim=1, eps=0).sum()",
            "loss = F.normalize(rows, dim=1, eps=1e-06).sum()",
        ),
        ("loss = rows[:1].std(0).sum()", "loss = rows[:1].std(0, correction=0).sum()"),
        ("loss = torch.logit(zero).sum()", "loss = torch.logit(zero, eps=1e-06).sum()"),
        (
            "loss = torch.linalg.inv_ex(swap - swap)[0].sum()",
            "loss = torch.linalg.inv_ex(swap - swap + 1e-06 * torch.eye(2))[0].sum()",
        ),
        (
            "loss = 2 * torch.logdet(flow * 3)",
            "loss = 2 * torch.linalg.slogdet(flow * 3).logabsdet",
        ),
        ("loss = (flow * 3).logdet() + 1", "loss = torch.linalg.slogdet(flow * 3).logabsdet + 1"),
        (
            "loss = torch.logdet(input=flow * 1e-7)",
            "loss = torch.linalg.slogdet(flow * 1e-7).logabsdet",
        ),
        ("loss = rows[rows > 1].mean()", "loss = rows[rows > 1].mean().nan_to_num()"),
        (
            "loss = torch.where(zero > 0, zero.log(), zero).sum()",
            "loss = torch.where(zero > 0, zero.clamp_min(1e-06).log(), zero).sum()",
        ),
        (
            "loss = (zero.log() + zero.sqrt()).sum()",
            "loss = (zero.clamp_min(1e-06).log() + (zero + 1e-06).sqrt()).sum()",
        ),
        (
            "loss = (\n    zero\n    .log()\n    .sum()\n)",
            "loss = (\n    zero.clamp_min(1e-06)\n    .log()\n    .sum()\n)",
        ),
    ],
)
def test_the_text_is_the_statement_as_it_is_to_stand(statement, edited, tmp_path):
    found = diagnosed(statement, tmp_path)
    assert (found.cure.text, found.cure.is_finite) == (edited, True)
    lines = (tmp_path / "a.py").read_text().splitlines()
    (edit,) = found.cure.edits
    before = "\n".join(line.removeprefix("    ") for line in lines[edit.first - 1 : edit.last])
    assert before == statement
    assert Diagnosis.from_json(found.to_json()) == found
    assert f"in place of {tmp_path / 'a.py'}:{edit.first}:" in str(found)


def test_a_number_inside_of_a_function_is_not_blamed(tmp_path: Path) -> None:
    found = diagnosed("loss = torch.logdet(swap)", tmp_path)
    assert (found.verdict, found.bad.name, found.bad.op) == ("maths", "logdet", "where")


def test_a_module_of_pytorch_is_edited_where_it_is_made(tmp_path: Path) -> None:
    head = "norm = nn.LayerNorm(4, eps=0.0)\nloss_of = nn.CTCLoss()\n"
    found = diagnosed("loss = norm(rows).sum()", tmp_path, head)
    assert found.cure.text == "norm = nn.LayerNorm(4, eps=1e-06)"
    sizes = "torch.tensor([2]), torch.tensor([3])"
    line = f"loss = loss_of(rows[:2, None].log_softmax(-1), torch.tensor([[1, 2, 3]]), {sizes})"
    found = diagnosed(line, tmp_path, head)
    assert found.cure.text == "loss_of = nn.CTCLoss(zero_infinity=True)"
    elsewhere = "never = lambda: nn.CTCLoss(zero_infinity=True)\nloss_of = vars(nn)['CTCLoss']()\n"
    assert "never" not in diagnosed(line, tmp_path, elsewhere).cure.text


def test_what_a_module_of_pytorch_does_with_its_own_is_not_edited_in_its_call(tmp_path):
    head = (
        "normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))\n"
        "normed.parametrizations.weight.original1.data[1] = 0\n"
        "layers = nn.Sequential(nn.Linear(4, 4), nn.LogSoftmax(-1))\n"
        "layers[0].bias.data[1] = float('-inf')\n"
    )
    for line in ("loss = normed(rows).sum()", "loss = (layers(rows).exp() * layers(rows)).sum()"):
        found = diagnosed(line, tmp_path, head)
        assert "rows +" not in found.cure.text
        assert "rows.clamp" not in found.cure.text


@pytest.mark.parametrize(
    ("head", "statement", "edited"),
    [
        (
            "one = nn.LayerNorm(4, eps=0.0)\ntwo = nn.LayerNorm(4)",
            "loss = (one(rows) + two(rows)).sum()",
            "one = nn.LayerNorm(4, eps=1e-06)",
        ),
        ("one = nn.LayerNorm(4, 0.0)", "loss = one(rows).sum()", "one = nn.LayerNorm(4, 1e-06)"),
        (
            "layers = nn.Sequential(nn.Identity(), nn.LayerNorm(4, 0.0))",
            "loss = layers(rows).sum()",
            "layers = nn.Sequential(nn.Identity(), nn.LayerNorm(4, 1e-06))",
        ),
        (
            "alike = nn.CosineSimilarity(-1, 0.0)",
            "loss = alike(rows, rows + 1).sum()",
            "alike = nn.CosineSimilarity(-1, 1e-06)",
        ),
        (
            "",
            "loss = F.normalize(rows, 2.0, -1, 0.0).sum()",
            "loss = F.normalize(rows, 2.0, -1, 1e-06).sum()",
        ),
        (
            "layer = nn.TransformerEncoderLayer(4, 1, 4, 0.0, layer_norm_eps=0.0)\n"
            "nn.init.zeros_(layer.self_attn.out_proj.weight)\nnorm = nn.LayerNorm(4)",
            "loss = norm(layer(rows)).sum()",
            "in the call of layer_norm reached from {file}:14: give it eps=1e-06",
        ),
    ],
)
def test_the_module_that_is_called_is_edited_and_no_other(head, statement, edited, tmp_path):
    found = diagnosed(statement, tmp_path, f"{head}\n")
    assert found.cure.is_finite, found
    assert found.cure.text == edited.format(file=tmp_path / "a.py")


def test_a_backward_in_python_is_edited_itself(tmp_path: Path) -> None:
    head = """
class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient / x
"""
    found = diagnosed("loss = Half.apply(zero).sum()", tmp_path, head)
    assert found.cure.text == "return gradient / x.clamp_min(1e-06)"
    assert found.cure.is_finite


def test_without_a_source_the_change_is_said_in_words() -> None:
    names: dict[str, Any] = {"torch": torch, "zero": torch.zeros(3, requires_grad=True)}
    exec("def step():\n    torch.log(zero).sum().backward()\n", names)
    found = halfstep.diagnose(names["step"])
    text = "give it x.clamp_min(1e-06), where x is its first argument"
    assert found.cure.text == f"in the call of log at <string>:2: {text}"
    assert not found.cure.edits
    assert found.cure.is_finite


def test_what_pytorch_refuses_is_not_offered(tmp_path: Path) -> None:
    found = diagnosed("loss = (1 / torch.complex(zero, zero)).abs().sum()", tmp_path)
    assert found.cure is None or ("clamp" not in found.cure.text and found.cure.is_finite)


def test_targets_that_are_all_ignored_are_told(tmp_path: Path) -> None:
    found = diagnosed("loss = F.cross_entropy(rows, torch.full((3,), -100))", tmp_path)
    text = str(found)
    assert "the targets (3) are all -100, which is ignore_index" in text
    assert "int64[3]: all 3 are -100" in text


def test_an_eps_that_is_zero_in_the_dtype_is_told() -> None:
    layer = nn.Linear(3, 3, bias=False).half()
    x = torch.zeros(2, 3).half()

    def step() -> None:
        h = layer(x)
        (h / (h.abs().sum(-1, keepdim=True) + 1e-12)).float().sum().backward()

    found = halfstep.diagnose(step)
    assert found.verdict == "range"
    assert any(note.startswith("1e-12 is 0 in float16") for note in found.notes)


def test_the_lines_around_are_shown(tmp_path: Path) -> None:
    found = diagnosed("x = zero + 0\nloss = x.log().sum()\ny = loss\nz = y", tmp_path)
    (tmp_path / "a.py").unlink()  # a record may be read elsewhere
    linecache.clearcache()
    text = str(found.from_json(found.to_json()))
    assert len(found.source) == 5
    assert ">   12  " in text
    shown = [line.strip() for line in text.splitlines() if "    " in line]
    assert any(line.endswith("x = zero + 0") for line in shown)
    assert any(line.endswith("z = y") for line in shown)


def test_a_teacher_is_named_and_no_batch_is_left_out() -> None:
    student, teacher, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.randn(4, 3)
    nn.init.constant_(teacher.weight, float("nan"))

    def step() -> None:
        (student(x) - teacher(x).detach()).square().mean().backward()

    found = halfstep.diagnose(step, model=student)
    assert found.verdict == "data"
    assert found.tensor.startswith("teacher.weight in ")
    assert "leave this batch out" not in found.cure.text


def test_an_edit_of_a_call_in_place_changes_what_it_writes_to(tmp_path: Path) -> None:
    body = """scores = rows[:, :3] * 2
scores.fill_diagonal_(-math.inf)
loss = F.cross_entropy(scores, torch.arange(3))"""
    assert "scores.fill_diagonal_(-10000.0)" in str(diagnosed(body, tmp_path).cure)


@pytest.mark.parametrize(
    ("divisor", "edited"),
    [
        ("zero if i else 1.0", "zero.clamp_min(1e-06) if i else 1.0"),
        ("-1.0 if not i else zero", "-1.0 if not i else zero.clamp_min(1e-06)"),
        ("zero if i else rows[0]", "zero.clamp_min(1e-06) if i else rows[0].clamp_min(1e-06)"),
    ],
)
def test_an_edit_of_a_condition_runs_in_the_other_case_too(divisor, edited, tmp_path):
    body = f"loss = (rows / ({divisor})).sum()"
    found = diagnosed(body, tmp_path, "i = True\nzero = zero.detach() + 1e-60\n")
    assert (found.cure.text, found.cure.is_finite) == (f"loss = (rows / ({edited})).sum()", True)
    for i in (True, False):
        run_file(f"{HEAD}i = {i}\n{found.cure.text}", tmp_path / "b.py")


def test_a_limit_that_hides_large_values_is_told_as_such(tmp_path: Path) -> None:
    for formula in ("((zero + 1e30) ** 2).sum()", "torch.dot(zero + 3e38, zero + 3e38)"):
        found = diagnosed(f"loss = {formula}", tmp_path)
        assert "clamp(-10000.0, 10000.0)" in found.cure.text
        said = "it changes 4 of 4 values, which then get no gradient"
        assert "".join(found.cure.remarks).count(said) == 1


def test_a_product_with_weights_is_not_made_a_cosine(tmp_path: Path) -> None:
    head = """
torch.manual_seed(0)
w, v = nn.Parameter(torch.randn(4, 8) * 30), nn.Parameter(torch.randn(8, 1))
x, y = torch.randn(16, 4), torch.rand(16, 1)
"""
    body = "h = torch.relu(x @ w)\nloss = (torch.exp(h @ v) - y).square().mean()"
    assert "normalize" not in str(diagnosed(body, tmp_path, head).cure)


HALF_LOOP = """
import torch
from torch import nn
import halfstep

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).half()
optimizer = torch.optim.Adam(model.parameters())
{cure}
scaler, told, losses = halfstep.GradScaler("cpu", enabled=False), [], []
with halfstep.diagnose(scaler, model=model, tell=lambda *found: told.append(found)):
    for _ in range(4):
        loss = model(torch.randn(4, 6).half()).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


def test_a_float16_weight_that_its_optimizer_made_bad_gets_master_weights(tmp_path: Path) -> None:
    ((found, step),) = run_file(HALF_LOOP.format(cure=""), tmp_path / "a.py")["told"]
    assert (found.verdict, step) == ("optimizer", 1)
    cured = run_file(HALF_LOOP.format(cure=found.cure.text.splitlines()[0]), tmp_path / "b.py")
    assert not cured["told"]
    assert len(cured["losses"]) == 4
    assert all(map(math.isfinite, cured["losses"]))


@pytest.mark.parametrize(
    ("statement", "edited"),
    [
        (
            "loss = torch.mm(low, low.mT).float().log().sum()",
            "loss = torch.mm(low.float(), low.mT.float()).float().log().sum()",
        ),
        (
            "loss = (one @ F.gaussian_nll_loss(low, one, low)[None]).float().sum()",
            "loss = (one @ F.gaussian_nll_loss(low.float(), one.float(), low.float()).half()[None])"
            ".float().sum()",
        ),
    ],
)
def test_all_operands_are_cast_and_the_result_where_what_follows_needs_it(
    statement: str, edited: str, tmp_path: Path
) -> None:
    found = diagnosed(f"low = (rows + 3e3).half()\none = low[:, :1] / 3e3\n{statement}", tmp_path)
    assert (found.cure.text, found.cure.is_finite) == (edited, True)


def test_edits_inside_of_a_checkpoint_are_chosen_where_the_call_stands(tmp_path: Path) -> None:
    body = """
from torch.utils.checkpoint import checkpoint

def block(x):
    low = x.log()
    return low - low.amax(-1, keepdim=True)
loss = checkpoint(block, rows, use_reentrant=False).sum()"""
    found = diagnosed(body, tmp_path)
    assert found.cure.is_finite
    assert found.cure.text == "low = x.clamp_min(1e-06).log()"
    assert not any("CheckpointError" in note for note in found.notes)
    # One looks for a stable form, one for what made the operand, one for parameters to move, one
    # for counts, of which log1p would be taken.
    assert found.num_replays == 7


@pytest.mark.parametrize(("mode", "is_label"), [("enable_grad", True), ("no_grad", False)])
def test_numbers_of_an_update_are_not_called_labels(
    mode: str, is_label: bool, tmp_path: Path
) -> None:
    body = f"""
with torch.{mode}():
    logs = torch.log(torch.tensor([0.5, 0.0, 2.0]))
loss = (zero[:3] + 1) @ logs"""
    remarks = "; ".join(diagnosed(body, tmp_path).cure.remarks)
    assert "it changes 1 of 3 values" in remarks
    assert ("if they are labels" in remarks) == is_label


@pytest.mark.parametrize(("size", "are_rows"), [(3, True), (4, False)])
def test_numbers_that_a_module_has_for_its_columns_are_not_called_rows(
    size: int, are_rows: bool, tmp_path: Path
) -> None:
    body = f"""
class Scaled(nn.Module):
    def forward(self, x):
        spread = torch.tensor([0.5, 0.0, 2.0])
        return x * torch.log(spread)
loss = Scaled()(zero[:3].expand({size}, 3) + 1).sum()"""
    remarks = "; ".join(diagnosed(body, tmp_path).cure.remarks)
    assert "1 of 3" in remarks
    assert ("row 1 of 3" in remarks) == are_rows


def test_values_are_counted_only_of_the_edit_that_is_told(tmp_path: Path) -> None:
    body = """
attn = nn.MultiheadAttention(4, 2, batch_first=True)
pad = torch.tensor([[True] * 3, [False, False, True]])
loss = attn(zero.expand(2, 3, 4), rows.expand(2, 3, 4), rows.expand(2, 3, 4), pad)[0].sum()"""
    cure = diagnosed(body, tmp_path).cure
    assert "_mask.all(-1, keepdim=True)" in cure.text
    assert not any("it changes" in remark for remark in cure.remarks)


def test_a_mask_is_not_clamped(tmp_path: Path) -> None:
    body = """
legal = torch.tensor([True, True, False, True]).logical_and(torch.ones(4, dtype=torch.bool))
p = torch.softmax(zero.masked_fill(~legal, -math.inf), -1)
loss = (p * torch.log(p)).sum()"""
    found = diagnosed(body, tmp_path)
    assert found.cure.is_finite
    assert not any("Bool" in note for note in found.notes)


@pytest.mark.parametrize(
    ("size", "rules"),
    [(2e-3, "mul@first:fp32; mul@other:fp32; mul@second:fp32"), (1e-5, "mul@other:fp32")],
)
def test_a_rule_serves_siblings_that_come_near_the_limit_at_the_same_line(
    size: float, rules: str, tmp_path: Path
) -> None:
    head = f"""
class Square(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = nn.Parameter(torch.tensor(size))
    def forward(self, x):
        return x + (x.half() * self.size).mean(-1, keepdim=True).log1p()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other, self.second = map(Square, (2e5, 2e5, 2e5 * {size}))
        self.third = nn.Linear(4, 1)

    def forward(self, x):
        return self.third(self.second(self.other(self.first(x))))

net, batch = Net(), torch.full((8, 4), 2.0)
"""
    body = """
with torch.autocast("cpu", dtype=torch.float16):
    x = batch.half()
    loss = net(x).float().mean()"""
    cure = diagnosed(body, tmp_path, head).cure
    assert cure.policy.endswith(rules)
    assert sum("in second" in remark for remark in cure.remarks) == ("second" in rules)


STORED = """
x = torch.arange(200.0).reshape(50, 4) {}
target = torch.arange(50.0)[:, None] / 50
x = x.half()  # less memory
loss = F.mse_loss(net(x.float() / {}), target)"""
NET = "torch.manual_seed(0)\nnet = nn.Linear(4, 1)\n"


def test_data_whose_size_a_cast_refuses_are_standardised_before_it(tmp_path: Path) -> None:
    cure = diagnosed(STORED.format("* 1000 + 1e6", 1), tmp_path, NET).cure
    assert cure.text == "x = ((x - x.mean(0)) / (x.std(0) + 1e-06)).half()  # less memory"
    assert cure.is_finite
    assert cure.losses[-1] < cure.losses[0] < 10


def test_a_line_of_which_an_edit_leaves_nothing_is_named(tmp_path: Path) -> None:
    cure = diagnosed(STORED.format("/ 200 + 7e4 * torch.eye(50, 4)", 7e4), tmp_path, NET).cure
    assert cure.text.startswith("leave out line ")
    assert cure.text.endswith("a.py: x = x.half()  # less memory")
    assert not cure.edits


def test_few_small_terms_of_a_power_are_kept_and_near_points_left_out() -> None:
    (of_points,) = OF_POINTS["div"]
    x = torch.tensor([[1e-4, 0.0], [1.0, 2.0], [2.0, 1.0], [3.0, 2.0]], requires_grad=True)
    assert of_points.text(x.norm(dim=1)) is not None
    assert of_points.text(x.square().sum(1) ** 2) is None
