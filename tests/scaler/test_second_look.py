"""Gradients that go bad between ``unscale_`` and ``step``: found, skipped, named."""

import math
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.scaler.test_changed_gradients import backward, param, warm
from tests.training import fused_or_not
from torch import Tensor
from torch.optim import SGD

from halfstep._pytorch import amp
from halfstep._scaler import GradScaler
from halfstep._scaler.scale_state import Reason
from halfstep.errors import SkippedStepsWarning


def divided_by_its_norm(params: list[Tensor]) -> None:
    for p in params:
        p.grad.div_(p.grad.norm())


def clipped_to_its_norm(params: list[Tensor]) -> None:
    """PyTorch's clipping, by a norm that is NaN: the maximum is."""
    torch.nn.utils.clip_grad_norm_(params, math.nan)


def summed_by_hand(params: list[Tensor]) -> None:
    """What another rank adds."""
    assert params[-1].grad is not None
    params[-1].grad += torch.tensor([math.inf])


def written_by_index(params: list[Tensor]) -> None:
    params[0].grad[0] = math.nan


def replaced(params: list[Tensor]) -> None:
    assert params[0].grad is not None
    params[0].grad = params[0].grad / 0.0


def replaced_where_it_was(params: list[Tensor]) -> None:
    """The new one may have the address of the old one."""
    params[0].grad = None
    params[0].grad = torch.full((1,), math.nan)


WRITES = [
    divided_by_its_norm,
    clipped_to_its_norm,
    summed_by_hand,
    written_by_index,
    replaced,
    replaced_where_it_was,
]


@fused_or_not
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepsWarning")
def test_a_step_with_what_went_bad_after_unscaling_is_skipped(write, fused, is_warm):
    p, q, scaler = param(), param(), GradScaler()
    optimizer = SGD([p, q], 1.0, momentum=0.5, fused=fused)
    if is_warm:
        warm(scaler, optimizer)
    backward(scaler, torch.cat([p, q]), 0.0 if write is divided_by_its_norm else 1.0)
    before = scaler.state_dict()["_growth_tracker"]
    scaler.unscale_(optimizer)
    write([p, q])
    assert scaler.step(optimizer) is None
    scaler.update()
    assert p.item() == q.item() == 1.0
    outcome, entry = scaler.outcome(optimizer), scaler.history()[-1]
    assert outcome.reason == entry.reason == Reason.AFTER_UNSCALE == "non-finite after unscale_"
    assert outcome.skipped
    assert not entry.taken
    assert outcome.culprits
    assert f"skipped, {Reason.AFTER_UNSCALE}; scale 2^16 -> 2^16" in repr(outcome)
    # Not the scale's fault: it moves as that of torch.amp, which has seen finite gradients.
    assert scaler.get_scale() == 2.0**16
    assert scaler.state_dict()["_growth_tracker"] == before + 1
    assert scaler.counts().skipped == scaler.counts().skipped_in_a_row == 1


@fused_or_not
def test_a_gradient_that_appears_is_checked(fused: bool) -> None:
    p, q, scaler = param(), param(), GradScaler()
    optimizer = SGD([p, q], 1.0, fused=fused)
    backward(scaler, p)
    scaler.unscale_(optimizer)
    q.grad = torch.tensor([math.inf])
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == q.item() == 1.0
    assert scaler.outcome(optimizer).culprits == ["param_groups[0]['params'][1]"]


def test_sparse_gradients_are_checked() -> None:
    table, scaler = torch.nn.Embedding(4, 2, sparse=True), GradScaler()
    optimizer = SGD(table.parameters(), 1.0)
    before = table.weight.detach().clone()
    scaler.scale(table(torch.tensor([1, 2])).sum()).backward()
    scaler.unscale_(optimizer)
    table.weight.grad._values()[0, 0] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(table.weight, before)
    assert scaler.outcome(optimizer).reason == Reason.AFTER_UNSCALE


def test_complex_gradients_are_checked() -> None:
    p, scaler = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)), GradScaler()
    optimizer = SGD([p], 1.0)
    scaler.scale(p.abs().sum()).backward()
    scaler.unscale_(optimizer)
    assert p.grad is not None
    p.grad /= 0.0
    scaler.step(optimizer)
    assert p.tolist() == [1.0, 1.0]


@fused_or_not
def test_what_a_fused_step_has_left_and_was_written_to_is_checked(fused: bool) -> None:
    """A fused step may leave them scaled: they are divided then, which hides no write."""
    shared, own, scaler = param(), param(), GradScaler()
    first, second = SGD([shared], 0.25, fused=True), SGD([shared, own], 0.25, fused=fused)
    backward(scaler, shared + own)
    scaler.step(first)
    assert shared.grad is not None
    shared.grad.fill_(math.nan)
    scaler.step(second)
    assert scaler.outcome(second).reason == Reason.AFTER_UNSCALE
    assert (shared.item(), own.item()) == (0.75, 1.0)


def test_a_closure_that_unscales_and_writes() -> None:
    p, scaler = param(), GradScaler()
    optimizer = SGD([p], 1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        p.grad.div_(0.0)
        return loss

    assert scaler.step(optimizer, closure) is None
    scaler.update()
    assert p.item() == 1.0
    assert scaler.outcome(optimizer).reason == Reason.AFTER_UNSCALE
    assert scaler.get_scale() == 2.0**16


def test_skips_in_a_row_are_reported_with_their_cause() -> None:
    p, scaler = param(), GradScaler(max_consecutive_skips=3)
    optimizer = SGD([p], 1.0)

    def iterate() -> None:
        optimizer.zero_grad()
        backward(scaler, p)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([p], math.nan)
        scaler.step(optimizer)
        scaler.update()

    iterate()
    iterate()
    says = r"(?s)updates 1 to 3 .* non-finite after unscale_; .* between unscale_\(\) and step\(\)"
    with pytest.warns(SkippedStepsWarning, match=says):
        iterate()


def test_a_smaller_scale_is_not_tried() -> None:
    p, scaler = param(), GradScaler()
    optimizer = SGD([p], 1.0)
    attempts = 0
    for _ in scaler.retry(optimizer, times=3):
        attempts += 1
        optimizer.zero_grad()
        backward(scaler, p)
        scaler.unscale_(optimizer)
        p.grad.fill_(math.nan)
        scaler.step(optimizer)
        scaler.update()
    assert attempts == 1


# --- what it costs --------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of gradients that each pass of the checking kernel has read."""
    found: list[int] = []
    kernel = amp.check_and_unscale_

    def counting(values: list[Tensor], *args: Any) -> None:
        found.append(len(values))
        kernel(values, *args)

    monkeypatch.setattr("halfstep._gradients.gradients.check_and_unscale_", counting)
    return found


@fused_or_not
@pytest.mark.skipif(DEVICE != "cpu", reason="versions tell only on a CPU")
def test_what_nobody_wrote_to_is_not_read_again(read: list[int], fused: bool) -> None:
    params, scaler = [param() for _ in range(4)], GradScaler()
    optimizer = SGD(params, 0.0, fused=fused)
    for written in ([], [1], [0, 1, 2, 3]):
        optimizer.zero_grad()
        scaler.scale(sum(p * 1.0 for p in params)).backward()  # not views of one gradient
        scaler.unscale_(optimizer)
        read.clear()
        for index in written:
            grad = params[index].grad
            assert grad.norm().item() == 1.0  # a read is no write
            grad.clamp_(max=0.5)
        scaler.step(optimizer)
        scaler.update()
        assert read == ([len(written)] if written else [])
        assert scaler.outcome(optimizer).taken


@fused_or_not
def test_a_step_without_unscaling_reads_nothing_more(read: list[int], fused: bool) -> None:
    params, scaler = [param() for _ in range(4)], GradScaler()
    optimizer = SGD(params, 0.0, fused=fused)
    warm(scaler, optimizer)
    warm(scaler, optimizer)  # elsewhere than on a CPU more of the first steps are measured
    read.clear()
    backward(scaler, torch.cat(params))
    scaler.step(optimizer)
    assert read == [4]


def test_torch_counts_writes_by_its_clipping_on_a_cpu() -> None:
    """Elsewhere one kernel writes to all gradients, and bumps no version."""
    grads = [torch.ones(3, device="cpu") for _ in range(2)]
    torch._foreach_mul_(grads, 0.5)
    assert [grad._version for grad in grads] == [1, 1]
