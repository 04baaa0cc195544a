"""Diagnoses of many kinds of steps; faults of all kinds are in test_score.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.device import DEVICE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.line import Line
from halfstep._tools.watch.watch import Watch


class Tower(nn.Module):
    """Three layers; the second one multiplies by ``factor``."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.factor = factor
        self.is_checkpointed: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == 1 and self.is_checkpointed is not None:
                x = checkpoint(self.grown, x, use_reentrant=self.is_checkpointed)
            elif index == 1:
                x = self.grown(x)
            else:
                x = layer(x)
        return x

    def grown(self, x: Tensor) -> Tensor:
        return self.layers[1](x) * self.factor  # the line


def line_with(text: str) -> int:
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def step_of(model: nn.Module, dtype: torch.dtype = torch.float16, scale: float = 256.0):
    x, scaler = torch.randn(4, 8).requires_grad_(), halfstep.GradScaler(init_scale=scale)

    def step() -> None:
        with halfstep.autocast(DEVICE, dtype):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()

    return step


def test_an_op_between_modules_has_its_line_and_what_it_needs() -> None:
    model = Tower(1e6)
    found = halfstep.diagnose(step_of(model), model=model)
    bad = found.bad
    assert (found.verdict, bad.op, bad.module, bad.phase) == ("range", "mul", "", "forward")
    text = "return self.layers[1](x) * self.factor  # the line"
    assert bad.line == Line(__file__, line_with("# the line"), "grown", text)
    (read,) = bad.inputs
    assert read.low is not None
    assert read.high is not None
    largest = max(-read.low, read.high)
    assert bad.needs == pytest.approx(largest * 1e6, rel=1e-6)
    assert bad.limit == 65504
    assert found.ends == ("loss",)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpointed_code(is_reentrant: bool) -> None:
    model = Tower(1e6)
    model.is_checkpointed = is_reentrant
    found = halfstep.diagnose(step_of(model), model=model)
    assert (found.verdict, found.bad.op, found.bad.line.function) == ("range", "mul", "grown")  # type: ignore[union-attr]


def test_a_gradient_that_overflows_in_a_checkpoint_has_the_line_of_its_op() -> None:
    model = Tower(30.0)
    model.is_checkpointed = False
    found = halfstep.diagnose(step_of(model, scale=2.0**20), model=model)
    assert (found.verdict, found.bad.phase) == ("scale", "backward")
    assert found.bad.forward_line is not None
    assert found.cure.is_finite
    assert found.cure.scale is not None
    assert found.cure.scale < 2.0**20


def test_compiled_models_are_replayed_in_eager_mode_and_it_is_said() -> None:
    model = Tower(1e6)
    compiled = torch.compile(model, backend="eager")
    found = halfstep.diagnose(step_of(compiled), model=compiled)
    assert (found.verdict, found.bad.op) == ("range", "mul")
    assert any("compiled" in note for note in found.notes)


def test_accumulation_names_the_batch_that_is_bad() -> None:
    model, scaler = nn.Sequential(nn.Linear(4, 4)), halfstep.GradScaler(init_scale=8.0)
    batches = [torch.ones(2, 4), torch.ones(2, 4)]
    batches[1][0, 3] = math.inf

    def step() -> None:
        for index, batch in enumerate(batches):
            with halfstep.autocast(DEVICE, torch.float16):
                loss = model(batch).float().mean() / len(batches)
            scaler.scale(loss).backward()
            assert index < 2

    found = halfstep.diagnose(step, model=model)
    assert found.verdict == "data"
    assert found.tensor is not None
    assert "batches[1] in" in found.tensor
    assert found.bad.call == 2


def test_a_parameter_that_was_bad_before() -> None:
    model = Tower()
    with torch.no_grad():
        model.layers[2].bias[1] = math.nan
    found = halfstep.diagnose(step_of(model))
    assert (found.verdict, found.tensor) == ("data", "layers.2.bias")
    assert "layers.2.bias" in found.cure.text


def test_gradients_left_of_a_bad_step_hide_no_cure() -> None:
    model, x = Tower(1e6), torch.randn(4, 8)

    def step() -> Tensor:
        with halfstep.autocast(DEVICE, torch.float16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    step()
    left = [param.grad for param in model.parameters()]
    found = halfstep.diagnose(step, model=model)
    assert any("gradients were inf or NaN before the replay" in note for note in found.notes)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), left, strict=True))

    def fresh_step() -> Tensor:
        model.zero_grad()
        return step()

    fresh = halfstep.diagnose(fresh_step, model=model)
    assert fresh.notes == ()
    assert (found.verdict, found.bad, found.cure) == (fresh.verdict, fresh.bad, fresh.cure)
    assert found.cure.is_finite


def test_plain_torch_autocast_and_its_scaler() -> None:
    model, x = Tower(), torch.randn(4, 8)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    before = [p.clone() for p in model.parameters()]
    found = halfstep.diagnose(step, model=model)
    assert found.verdict == "scale"
    assert found.scale == 2.0**30
    assert scaler.get_scale() == 2.0**30
    assert all(map(torch.equal, before, model.parameters()))
    model.factor, optimizer.param_groups[0]["lr"] = 1e6, 1e-20
    with torch.no_grad():
        model.layers[0].weight.mul_(10)
    found = halfstep.diagnose(step, model=model)
    assert found.verdict == "range"
    assert found.cure.is_finite


def test_float16_parameters_without_autocast_are_replayed_in_float32() -> None:
    model, x = Tower(1e6).half(), torch.randn(4, 8).half()
    found = halfstep.diagnose(lambda: model(x).sum().backward(), model=model)
    assert (found.verdict, found.bad.op) == ("range", "mul")
    assert found.cure.is_finite
    assert found.cure.text.startswith("model.float()")


def test_a_cast_in_the_code_is_no_replay_in_float32() -> None:
    """0 / (0 + 1e-8) is finite in float32, and 1e-8 is 0 in float16."""
    x = torch.zeros(2, 4, requires_grad=True)

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            half = x.half()
            (half / (half.norm(dim=-1, keepdim=True) + 1e-8)).float().sum().backward()

    found = halfstep.diagnose(step)
    assert found.is_finite_in_float32 is None
    assert "float32" not in str(found).splitlines()[0]


def test_infinities_on_purpose_are_no_fault() -> None:
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    mask = torch.full((8, 8), -math.inf).triu(1)

    def step() -> None:
        with halfstep.autocast(DEVICE, torch.float16):
            scores = model(x)
            one = torch.softmax(scores + mask, -1)
            two = torch.softmax(scores.masked_fill(mask.isinf(), -math.inf), -1)
            dropped = torch.where(mask.isinf(), torch.zeros(8, 8), (mask * 0 + 1).nan_to_num())
        (one + two + dropped).sum().backward()

    assert halfstep.diagnose(step, model=model).verdict == "none"


def test_a_row_that_is_masked_in_whole_is_mathematics() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def step() -> None:
        scores = model(x).masked_fill(torch.arange(4)[:, None] == 1, -math.inf)
        torch.softmax(scores, -1).square().sum().backward()

    found = halfstep.diagnose(step, model=model)
    assert (found.verdict, found.bad.op) == ("maths", "_softmax")
    assert found.cure.is_finite


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x, keep: torch.log(x.abs() * keep), "log"),
        (lambda x, keep: 1 / (x * keep), "reciprocal"),
        (lambda x, keep: (x * keep) / (x * keep), "div"),
        (lambda x, keep: (x.abs() * keep).sqrt(), "sqrt"),
        (lambda x, keep: torch.acos(x.tanh() / 2 * keep + 2 * (1 - keep)), "acos"),
        (lambda x, keep: (x.abs() * keep).pow(-0.5), "pow"),
    ],
)
def test_where_a_function_is_not_defined_the_edit_is_tried(function, op: str) -> None:
    model, x, keep = nn.Linear(4, 4), torch.randn(3, 4), torch.tensor([[0.0], [1.0], [1.0]])
    found = halfstep.diagnose(lambda: function(model(x), keep).sum().backward(), model=model)
    assert found.verdict == "maths", str(found)
    assert op in (found.bad.op, found.bad.forward_op), str(found)
    assert found.cure.is_finite, str(found)


def test_a_backward_of_the_user_has_its_own_line() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x * 2  # in forward

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient * 2e5  # in backward

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    found = halfstep.diagnose(lambda: Twice.apply(model(x).half()).sum().backward(), model=model)
    bad = found.bad
    assert (bad.op, bad.phase) == ("mul", "backward")
    assert bad.line.number == line_with("# in backward")
    assert bad.forward_line.number == line_with("# in forward")


def test_an_error_of_the_step_is_raised_unless_a_bad_value_led_to_it() -> None:
    model = Tower()

    def wrong() -> None:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        halfstep.diagnose(wrong)

    def guarded() -> None:
        loss = torch.log(model(torch.randn(2, 8)) * 0).mean()
        if not loss.isfinite():
            raise FloatingPointError("loss is not finite")
        loss.backward()

    found = halfstep.diagnose(guarded, model=model)
    assert found.bad.op == "log"
    assert any("FloatingPointError" in note for note in found.notes)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"diagnose\(Tensor\): pass the function that runs a step"):
        halfstep.diagnose(torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"diagnose\(Linear\): pass the function .* diagnose\(step, model=model\)"
    ):
        halfstep.diagnose(torch.nn.Linear(4, 1))
    with pytest.raises(TypeError, match=r"diagnose\(model=str\)"):
        halfstep.diagnose(lambda: None, model="model")  # type: ignore[arg-type]


def test_the_text_says_what_a_person_needs() -> None:
    model = Tower(1e6)
    text = str(halfstep.diagnose(step_of(model), model=model))
    assert text.startswith("range: `mul` in the forward pass overflowed float16; in float32 it is")
    assert "return self.layers[1](x) * self.factor" in text
    assert "float16 ends at 65,504" in text
    assert "cure (replayed: finite)" in text


def test_one_replay_is_not_several() -> None:
    one = Diagnosis("none", num_replays=1)
    assert "\n1 replay, " in str(one)
    assert "\n2 replays, " in str(replace(one, num_replays=2))


def test_json_holds_everything() -> None:
    model = Tower(30.0)
    found = halfstep.diagnose(step_of(model, scale=2.0**20), model=model)
    assert Diagnosis.from_json(found.to_json()) == found


def test_a_replay_of_a_bad_loss_goes_backward_only_once_it_is_cured() -> None:
    count = 0
    model = nn.Linear(3, 3)

    def note(_: Tensor) -> None:
        nonlocal count
        count += 1

    with Watch(tell=lambda *_: None) as watch:
        hidden = model(torch.zeros(3)).abs() * torch.tensor([0.0, 1.0, 1.0])
        hidden.register_hook(note)
        hidden.log().sum().backward()
    (found,) = watch.found
    assert found.cure.is_finite
    # All but the two of the step as it is; the trial once for each loss; once in the training.
    assert count == found.num_replays - 4 + len(found.cure.losses) + 1


def test_a_replay_of_a_function_goes_backward_always() -> None:
    count = 0
    x = torch.zeros(3, requires_grad=True)

    def note(_: Tensor) -> None:
        nonlocal count
        count += 1

    def step() -> None:
        hidden = x * 1.0
        hidden.register_hook(note)
        hidden.log().sum().backward()

    assert halfstep.diagnose(step).num_replays == count > 1
