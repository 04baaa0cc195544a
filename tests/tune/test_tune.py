"""Tuning: the islands that are found, and their effects."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.tune.models import (
    HEALTHY,
    Attends,
    Cancels,
    Flushes,
    Overflows,
    SpoilsGradients,
    with_inner,
)
from torch import Tensor, nn

import halfstep
from halfstep import Policy, self_check, tune
from halfstep._tools.tune.passes import LossFn
from halfstep._tools.tune.tuner import Tuned

pytestmark = pytest.mark.slow

PLANTED = (Overflows, nn.Linear, Cancels, Flushes)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def planted() -> tuple[nn.Module, list[Tensor]]:
    return with_inner(*PLANTED), [torch.randn(32, 8) for _ in range(2)]


@dataclass
class Sample:
    """An output like that of a decoder."""

    sample: Tensor


@pytest.mark.parametrize(
    "outputs",
    [
        lambda model, x: Sample(model(x)),
        lambda model, x: Sample(model(x).detach()),
        torch.no_grad()(lambda model, x: model(x)),
        torch.inference_mode()(lambda model, x: (Sample(model(x)), None)),
    ],
)
def test_outputs_without_a_loss(outputs: LossFn) -> None:
    model, batches = with_inner(nn.Linear, Overflows), [torch.randn(32, 8)]
    tuned = tune(model, batches, outputs)
    assert tuned.is_met
    assert tuned.islands == ("2.inner",)


def test_gradients_count_unless_outputs_have_none() -> None:
    model, batches = with_inner(nn.Linear, SpoilsGradients), [torch.randn(32, 8)]
    assert tune(model, batches, None).islands == ("2.inner",)
    assert not tune(model, batches, lambda model, x: model(x).detach()).islands


@pytest.fixture(scope="module")
def found() -> tuple[nn.Module, list[Tensor], Tuned]:
    torch.manual_seed(0)
    model, batches = planted()
    return model, batches, tune(model, batches, None, policy="standard; gelu:lower")


# --- which islands --------------------------------------------------------------------------------


def test_three_fragile_modules_are_found_and_no_other() -> None:
    for seed in range(1, 3):
        torch.manual_seed(seed)
        model, batches = planted()
        tuned = tune(model, batches, None)
        assert tuned.islands == ("1.inner", "3.inner", "4.inner")
        assert str(tuned.policy) == "standard; @1.inner:fp32; @3.inner:fp32; @4.inner:fp32"
        assert tuned.is_met
        assert all(self_check(model, each, policy=tuned.policy).passed for each in batches)


def test_none_of_them_can_be_dropped(found) -> None:
    model, batches, tuned = found
    for island in tuned.effects:
        others = [name for name in ("1.inner", "3.inner", "4.inner") if name != island.name]
        policy = "; ".join(["standard", *(f"@{name}:fp32" for name in others)])
        assert not all(self_check(model, each, policy=policy).passed for each in batches)


def test_in_bfloat16_only_precision_matters() -> None:
    model, batches = planted()
    assert tune(model, batches, None, torch.bfloat16).islands == ("3.inner",)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", HEALTHY)
def test_healthy_models_need_none(make, dtype: torch.dtype) -> None:
    model, batch, loss_fn = make()
    tuned = tune(model, [batch], loss_fn, dtype)
    assert (tuned.islands, tuned.effects, tuned.is_met) == ((), (), True)
    assert tuned.policy == halfstep.preset("standard")


def test_a_bound_that_is_given_is_met() -> None:
    model, batch = with_inner(nn.Linear), torch.randn(32, 8)
    plain = max(row.output.error for row in tune(model, [batch], None).rows)
    error = plain * 0.8
    tuned = tune(model, [batch], tolerance=error)
    assert 0 < len(tuned.islands) < 7
    assert max(row.output.error for row in tuned.rows_after) <= error
    assert self_check(model, batch, policy=tuned.policy, tolerance=error).passed


def test_the_batch_on_which_it_fails_counts() -> None:
    class Grows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 300

    model = nn.Sequential(nn.Linear(8, 8), Grows(8, 8))
    small, large = torch.randn(4, 8), torch.randn(4, 8) * 1000

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().mean()

    assert tune(model, [small], loss_fn).islands == ()
    assert tune(model, [small, large, small], loss_fn).islands == ("1",)


def test_where_the_cure_is_before_the_failure() -> None:
    class Differs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(-1, keepdim=True)

    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.bias.fill_(3000.0)
    model = nn.Sequential(nn.Linear(8, 8), layer, Differs(), nn.Linear(8, 4))
    check = self_check(model, torch.randn(16, 8))
    assert check.origins == ("2",)
    tuned = tune(model, [torch.randn(16, 8)], None)
    assert (tuned.islands, tuned.is_met) == (("1",), True)


def test_what_a_module_does_between_its_modules() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Attends(), nn.Linear(16, 4))
    kinds = [type(module) for module in model.modules()]
    tuned = tune(model, [torch.randn(2, 8, 16)], None)
    assert (tuned.islands, tuned.is_met) == (("matmul@1",), True)
    assert str(tuned.policy) == "standard; matmul@1:fp32"
    verdict = "fp16: 1 op in fp32 is needed and enough (the model has 7 modules)"
    assert str(tuned).splitlines()[0] == verdict
    assert [type(module) for module in model.modules()] == kinds


def confident() -> tuple[nn.Module, tuple[Tensor, Tensor], LossFn]:
    """A classifier that is sure and right: its loss is small, and so are the gradients."""
    model, targets = nn.Sequential(nn.Linear(8, 8)), torch.arange(8)
    with torch.no_grad():
        model[0].weight.copy_(10 * torch.eye(8) + 0.1 * torch.randn(8, 8))
    return model, (torch.eye(8), targets), lambda model, b: F.cross_entropy(model(b[0]), b[1])


def test_an_op_of_the_loss_can_be_kept() -> None:
    model, batch, loss_fn = confident()
    given = "standard; cross_entropy_loss:leave"
    tuned = tune(model, [batch], loss_fn, torch.bfloat16, policy=given)
    assert str(tuned.policy) == f"{given}; cross_entropy_loss:fp32"
    assert (tuned.islands, tuned.is_met) == (("cross_entropy_loss@",), True)
    assert tuned.table().splitlines()[1].startswith("cross_entropy_loss  rounding ")
    assert self_check(model, batch, loss_fn, torch.bfloat16, given).origins == ("",)


def test_what_no_island_cures_is_said() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return F.linear(model(batch), torch.full((1, 4), 1e5)).float().mean()

    model = with_inner(nn.Linear, nn.Linear)
    tuned = tune(model, [torch.randn(32, 8)], loss_fn)
    assert not tuned.is_met
    assert tuned.islands == ()
    verdict = str(tuned).splitlines()[0]
    assert verdict.startswith("fp16: NOT within bounds, whatever stays in fp32: ")
    assert "begins in ops outside of its modules, or the loss" in verdict


# --- how they are measured ------------------------------------------------------------------------


def test_an_island_of_keep_is_that_of_a_rule() -> None:
    """Measurements use the one, the policy that is written the other."""
    model, (batch, _) = planted()
    with halfstep.keep(model, "1.inner", "4.inner"):
        kept = self_check(model, batch)
    ruled = self_check(model, batch, policy="standard; @1.inner:fp32; @4.inner:fp32")
    assert kept == ruled
    assert not kept.passed


def test_nothing_changes() -> None:
    model, batches = planted()
    model[0].weight.grad = torch.ones(16, 8)
    tensors = [*model.parameters(), *batches, model[0].weight.grad]
    before = [each.detach().clone() for each in tensors] + [torch.get_rng_state()]
    kinds = [type(module) for module in model.modules()]
    tune(model, batches, None)
    assert all(map(torch.equal, before, [*tensors, torch.get_rng_state()]))
    assert [type(module) for module in model.modules()] == kinds
    assert model[1].norm.weight.grad is None


def pops(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    targets = batch.pop("sample")
    return (model(targets).float() - 1).square().mean()


def sets(model: nn.Module, batch: Sample) -> Tensor:
    batch.sample = model(batch.sample.mul_(2))
    return batch.sample.float().square().mean()


@pytest.mark.parametrize(("loss_fn", "kind"), [(pops, dict), (sets, Sample)])
def test_a_batch_that_the_program_changes_is_the_same_in_each_step(loss_fn, kind) -> None:
    batch, values = kind(sample=torch.randn(32, 8)), torch.randn(32, 8)
    sample = batch["sample"] if kind is dict else batch.sample
    sample.copy_(values)
    assert tune(with_inner(nn.Linear), [batch], loss_fn).is_met
    assert batch == kind(sample=sample)
    assert torch.equal(sample, values)


def test_effects(found) -> None:
    tuned = found[2]
    first, second, third = tuned.effects
    assert [each.kind for each in tuned.effects] == ["Overflows", "Cancels", "Flushes"]
    assert first.loses_to.startswith("overflow, ")
    assert third.loses_to == "zeros, 100 %"
    assert first.error_without.error == float("inf")
    assert 0.1 < second.error_without.error < 2
    assert third.error_without.error == pytest.approx(1.0, abs=0.01)
    assert {each.error_with for each in tuned.effects} == {first.error_with}
    assert first.error_with.error < first.error_with.tolerance < 0.2


# --- how it is told -------------------------------------------------------------------------------


def test_the_table_and_the_file(found, tmp_path: Path) -> None:
    tuned = found[2]
    verdict, policy, head, *lines = str(tuned).splitlines()
    assert verdict == "fp16: 3 modules in fp32 are needed and enough (the model has 19 modules)"
    assert policy == f"policy: {tuned.policy}"
    assert tuned.table().splitlines() == [head, *lines]
    assert re.split("  +", head) == ["kept in fp32", "class", "in fp16", "error without", "with"]
    assert lines[0].split()[:5] == ["1.inner", "Overflows", "overflow,", "100", "%"]
    tuned.policy.save(tmp_path / "my.policy")
    assert Policy.load(tmp_path / "my.policy") == tuned.policy
    assert repr(tuned) == f"<Tuned fp16, 3 modules in fp32, {tuned.policy}>"


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], ValueError, "batches is empty"),
        (
            torch.ones(2, 8),
            TypeError,
            r"batches must be a list of batches, got Tensor: write \[batch\]",
        ),
        (iter([]), TypeError, r"got list_iterator: write \[batch\], list\(loader\)"),
    ],
)
def test_batches_are_a_list(batches, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tune(nn.Linear(8, 4), batches, None)
