"""Self-checks of healthy and of broken models, and their text."""

import math
import random
import re

import pytest
import torch
from tests.device import DEVICE
from tests.tune.models import (
    HEALTHY,
    Attends,
    Cancels,
    Flushes,
    Overflows,
    SpoilsGradients,
    cnn,
    gpt,
    with_inner,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import self_check

pytestmark = pytest.mark.slow

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# --- what passes and what fails -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", HEALTHY)
def test_healthy_models_pass_by_far(make, dtype: torch.dtype) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model, batch, loss_fn = make()
        check = self_check(model, batch, loss_fn, dtype)
        assert check.passed, check
        assert check.origins == ()
        assert 0.01 < max(row.severity for row in check.rows) < 0.7


@pytest.mark.parametrize("make", [gpt, cnn])
def test_trained_ones_pass_too(make) -> None:
    """Of a batch that is known by heart the gradient is a small difference of large parts."""
    model, batch, loss_fn = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    for dtype in DTYPES:
        check = self_check(model, batch, loss_fn, dtype, "standard; cross_entropy_loss:fp32")
        assert check.loss32 < 0.1
        assert check.passed, check
        assert max(row.severity for row in check.rows) < 0.7


@pytest.mark.parametrize("kind", [Overflows, Cancels, Flushes, SpoilsGradients])
def test_a_planted_fault_fails_and_is_named(kind: type[nn.Linear]) -> None:
    for place in range(3):
        kinds = [nn.Linear] * 3
        kinds[place] = kind
        check = self_check(with_inner(*kinds), torch.randn(32, 8))
        assert not check.passed
        assert check.origins == (f"{place + 1}.inner",)
        assert check.rows[0].module == f"{place + 1}.inner"
        assert str(check).startswith("FAILED: ")
        assert f"it begins in {place + 1}.inner;" in str(check)


def test_bfloat16_has_range_but_not_precision() -> None:
    def passes(kind: type[nn.Linear]) -> bool:
        return self_check(with_inner(kind), torch.randn(32, 8), dtype=torch.bfloat16).passed

    assert [passes(kind) for kind in (Overflows, Flushes, Cancels)] == [True, True, False]


def test_a_fault_between_modules_is_that_of_the_module_around_them() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Attends(), nn.Linear(16, 4))
    assert self_check(model, torch.randn(2, 8, 16)).origins == ("1",)


def test_a_loss_that_overflows_is_blamed_on_no_module() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch).detach().abs() * 1e6).sum() + model(batch).sum() * 1e-3

    check = self_check(nn.Sequential(nn.Linear(16, 4)), torch.randn(8, 16), loss_fn)
    assert math.isfinite(check.loss32)
    assert (check.loss, check.passed, check.origins) == (math.inf, False, ("",))
    assert "it begins in ops outside of its modules, or the loss;" in str(check)


def test_the_policy_decides() -> None:
    model, batch = with_inner(Overflows), torch.randn(32, 8)
    assert self_check(model, batch, policy="standard; @1.inner:fp32").passed
    assert self_check(model, batch, policy=halfstep.preset("fp32")).rows[0].output.error == 0.0


def test_a_tolerance_holds_for_all() -> None:
    model, batch = with_inner(nn.Linear), torch.randn(32, 8)
    errors = [row.output.error for row in self_check(model, batch).rows]
    assert not self_check(model, batch, tolerance=max(errors) * 0.9).passed
    assert self_check(model, batch, tolerance=0.1).passed


# --- what is measured -----------------------------------------------------------------------------


def test_errors_are_those_of_two_runs_by_hand() -> None:
    model, batch = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(8, 16)
    check = self_check(model, batch, lambda model, batch: model(batch).mean(), torch.bfloat16)
    found = {}
    for enabled in (True, False):
        model.zero_grad()
        with halfstep.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            hidden = model[1](model[0](batch))
            hidden.retain_grad()
            loss = model[2](hidden).mean()
        loss.backward()
        gradient = torch.cat([model[0].weight.grad.flatten(), model[0].bias.grad])
        found[enabled] = [each.detach().double() for each in (hidden, hidden.grad, gradient)]
    wanted = [
        ((seen - right).norm() / right.norm()).item()
        for seen, right in zip(*found.values(), strict=True)
    ]
    rows = {row.module: row for row in check.rows}
    parts = [rows["1"].output, rows["1"].output_gradient, rows["0"].parameters]
    assert [part.error for part in parts] == pytest.approx(wanted, rel=1e-5)
    assert wanted[0] > 0


def test_gradients_too_small_for_float16_are_scaled_first() -> None:
    model, batch = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)), torch.randn(8, 16)
    check = self_check(model, batch, lambda model, batch: model(batch).float().mean() * 1e-12)
    assert check.passed
    assert check.scale == 2.0**40
    assert max(row.underflow_share for row in check.rows) == 0.0


def test_the_scale_backs_off() -> None:
    model, batch = nn.Sequential(nn.Linear(16, 16), SpoilsGradients(16, 1)), torch.randn(8, 16)
    found = []
    for factor in (1.0, 1e3, 1e12):
        model[1].factor = factor
        check = self_check(model, batch)
        found.append((check.passed, check.scale))
    (_, first), (_, second), last = found
    assert found[0][0]
    assert found[1][0]
    assert 1 < second < first / 16
    assert last == (False, 1.0)  # no scale helps


def test_masks_of_inf_are_no_overflow() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x < 0, -math.inf)

    model = nn.Sequential(nn.Linear(16, 16), Masked(), nn.Softmax(-1))
    assert self_check(model, torch.randn(8, 16)).passed


def test_dropout_drops_the_same() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    assert self_check(model, torch.randn(64, 16)).passed
    assert self_check(model.eval(), torch.randn(64, 16)).passed
    assert not model.training


class Twice(nn.Module):
    """Calls a module twice, keeps state, checkpoints."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = nn.Linear(16, 16), use_reentrant
        self.calls, self.last = 0, torch.zeros(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.inner(x)
        again = checkpoint(self.inner, torch.relu(self.last), use_reentrant=self.use_reentrant)
        return again + self.last


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_calls_of_one_module_count_together(use_reentrant: bool) -> None:
    model, batch = Twice(use_reentrant), torch.randn(2, 16)
    rows = {row.module: row for row in self_check(model, batch).rows}
    assert rows["inner"].output.size == 2 * batch.numel()
    assert rows["inner"].input.size == 2 * batch.numel()
    assert model.calls == 0
    assert model.last.shape == (2, 16)
    assert not model.last.requires_grad


@pytest.mark.parametrize(
    "batch", [torch.ones(2, 16), (torch.ones(2, 16),), {"input": torch.ones(2, 16)}]
)
def test_a_batch_is_what_the_model_is_called_with(batch) -> None:
    assert [row.kind for row in self_check(nn.Linear(16, 4), batch).rows] == ["Linear"]


def test_the_loss_of_an_output() -> None:
    class Outputs(nn.Module):
        def __init__(self, make) -> None:
            super().__init__()
            self.make, self.layer = make, nn.Linear(16, 4)

        def forward(self, x: Tensor) -> object:
            return self.make(self.layer(x))

    class WithLoss:
        def __init__(self, y: Tensor) -> None:
            self.loss = y.sum()

    x = torch.randn(4, 16)
    for make in (lambda y: {"loss": y.sum(), "logits": y}, WithLoss, Tensor.sum):
        model = Outputs(make)
        assert self_check(model, x).loss32 == pytest.approx(model.layer(x).sum().item(), rel=1e-5)
    model = Outputs(lambda y: (y, [y + 1]))
    y = model.layer(x)
    wanted = (y.square().mean() + (y + 1).square().mean()).item()
    assert self_check(model, x).loss32 == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(TypeError, match=r"returns str without .* pass a loss_fn\(model, batch\)"):
        self_check(Outputs(str), x)


def test_a_compiled_model_runs_eager_under_its_own_names() -> None:
    model = torch.compile(with_inner(Overflows), backend="eager")
    check = self_check(model, torch.randn(32, 8))
    assert check.origins == ("1.inner",)


# --- what is left as it was -----------------------------------------------------------------------


def states(model: nn.Module) -> list[Tensor]:
    """All of a model that an optimizer or a checkpoint sees, and the random numbers to come."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return [each.detach().clone() for each in (*tensors, torch.get_rng_state())]


@pytest.mark.parametrize("make", HEALTHY)
def test_nothing_changes(make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, loss_fn = make()
    parameters = list(model.parameters())
    for number, parameter in enumerate(parameters[1:]):
        parameter.grad = torch.full_like(parameter, number)
    gradients = [parameter.grad for parameter in parameters]
    versions = [parameter._version for parameter in parameters]
    before, python = states(model), random.getstate()
    attributes = [dict(vars(module)) for module in model.modules()]
    with torch.no_grad():
        self_check(model, batch, loss_fn)
    assert all(map(torch.equal, before, states(model)))
    assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))
    assert [parameter._version for parameter in parameters] == versions
    assert random.getstate() == python
    for module, kept in zip(model.modules(), attributes, strict=True):
        assert vars(module) == kept
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_lists_of_a_model_are_restored_before_each_pass() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.calls: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(1)
            return super().forward(x) * len(self.calls)

    model = Counts()
    assert self_check(model, torch.randn(8, 4)).passed
    assert model.calls == []


def test_nothing_changes_by_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4))
    batch = torch.randn(8, 16)
    before = states(model)

    def fails(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        self_check(model, batch, fails)
    assert all(map(torch.equal, before, states(model)))
    assert not torch.is_autocast_enabled(DEVICE)


def test_what_the_step_itself_changes_is_put_back() -> None:
    def trains(model: nn.Module, batch: Tensor) -> Tensor:
        batch.add_(1)
        with torch.no_grad():
            model.weight.data.mul_(2)
            model.scale = torch.ones(1)
            model.register_buffer("seen", batch)
        return model(batch).mean()

    model, batch = nn.Linear(16, 4), torch.randn(8, 16)
    before = [*states(model), batch.clone()]
    assert self_check(model, batch, trains).passed
    assert all(map(torch.equal, before, [*states(model), batch]))
    assert not hasattr(model, "scale")
    assert not hasattr(model, "seen")


# --- what is wrong --------------------------------------------------------------------------------


def calls_backward(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"dtype": torch.float32},
            ValueError,
            "dtype must be torch.float16 or torch.bfloat16, got",
        ),
        ({"tolerance": 0}, ValueError, "tolerance must be above 0 and finite"),
        ({"tolerance": "1"}, TypeError, "tolerance must be a number such as 0.01"),
        ({"policy": 3}, TypeError, "policy is a Policy or its text, such as .standard., got 3"),
        ({"policy": "standart"}, ValueError, "did you mean 'standard'"),
        (
            {"loss_fn": calls_backward},
            ValueError,
            r"loss_fn\(model, batch\) calls backward\(\).*return the loss",
        ),
        ({"loss_fn": 3}, TypeError, r"loss_fn gets the model and the batch; got 3 \(int\)"),
        (
            {"loss_fn": lambda out: out.sum()},
            TypeError,
            "gets the model and the batch; got function",
        ),
        ({"loss_fn": torch.nn.MSELoss()}, TypeError, "the model and the batch; got MSELoss"),
        (
            {"loss_fn": lambda model, batch: 1.0},
            TypeError,
            r"loss_fn\(model, batch\) returns float without a floating-point tensor",
        ),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"model": nn.Linear(16, 4).half()}, ValueError, "parameter weight is torch.float16"),
        ({"model": nn.LazyLinear(4)}, ValueError, "weight has no shape yet: run the model"),
    ],
)
def test_errors_say_what_to_do(arguments, error: type[Exception], message: str) -> None:
    given = {"model": nn.Linear(16, 4), "batch": torch.ones(2, 16)} | arguments
    with pytest.raises(error, match=message):
        self_check(**given)


# --- how it is told -------------------------------------------------------------------------------


def test_the_table() -> None:
    check = self_check(with_inner(nn.Linear, Flushes), torch.randn(32, 8))
    summary, _, head, first, *rest = str(check).splitlines()
    assert summary.startswith("FAILED: ")
    assert "in fp16 (scaled by " in summary
    assert head.split("  ")[0] == "module"
    assert re.match(r"2\.inner +Flushes +1 of 0\.\d+ .*100 % +begins here$", first)
    assert any(line.endswith(" FAIL") for line in rest)
    assert repr(check) == "<SelfCheck FAILED, 11 modules>"


def test_a_long_table_of_a_good_model_is_cut() -> None:
    lines = str(self_check(with_inner(*[nn.Linear] * 5), torch.randn(32, 8))).splitlines()
    assert lines[0].startswith("passed: 23 modules in fp16 agree with fp32; loss ")
    assert lines[-1] == "and 11 modules that passed, with smaller errors"
    assert len(lines) == 1 + 1 + 1 + 12 + 1


def test_without_gradients_it_says_so() -> None:
    check = self_check(nn.Linear(16, 4).requires_grad_(False), torch.randn(8, 16))
    assert check.passed
    assert "nothing requires a gradient" in str(check)


def test_what_is_not_finite_in_float32_either_does_not_pass() -> None:
    check = self_check(nn.Sequential(nn.Linear(4, 4)), torch.full((3, 4), float("nan")))
    assert not check.passed
    assert "loss nan in fp16, nan in fp32" in str(check)
