"""Gradients that change between the calls of an iteration, and steps that fail half-way."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import fused_or_not
from torch import Tensor
from torch.optim import SGD

from halfstep._scaler import GradScaler
from halfstep._scaler.clipping import NUM_STEPS
from halfstep.errors import CallOrderError


def param(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values or (1.0,)))


def backward(scaler: GradScaler, parameter: Tensor, factor: float = 1.0) -> None:
    scaler.scale((parameter * factor).sum()).backward()


def warm(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Make the steps in which the scaler also looks for gradients that are clipped too early."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().clone() for p in params]
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        backward(scaler, torch.cat(params))
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    for p, value in zip(params, values, strict=True):
        p.data.copy_(value)


def raiser(error: type[BaseException]) -> Callable[..., None]:
    def step(*args: Any, **kwargs: Any) -> None:
        raise error

    return step


# --- new gradients in the place of old ones -------------------------------------------------------


@fused_or_not
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("factor", [2.0, 1e36])
def test_a_shared_parameter_with_a_backward_for_each_optimizer(fused, set_to_none, factor):
    """The second gradient may lie where the first one lay, and is scaled all the same."""
    shared, scaler = param(), GradScaler()
    first, second = SGD([shared], 0.25, fused=fused), SGD([shared], 0.25, fused=fused)
    for optimizer, by in ((first, 1.0), (second, factor)):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(scaler, shared, by)
        scaler.step(optimizer)
    scaler.update()
    is_taken = factor == 2.0
    assert scaler.outcome(second).taken == is_taken
    assert shared.item() == (0.25 if is_taken else 0.75)
    assert not shared._post_accumulate_grad_hooks  # none is left


@pytest.mark.parametrize("set_to_none", [None, False, True])
def test_a_backward_after_unscaling_is_noticed(set_to_none: bool | None) -> None:
    p, scaler = param(), GradScaler()
    optimizer = SGD([p], 1.0)
    backward(scaler, p)
    scaler.unscale_(optimizer)
    if set_to_none is not None:
        optimizer.zero_grad(set_to_none=set_to_none)
    backward(scaler, p)
    with pytest.raises(CallOrderError, match=r"step\(SGD\): backward\(\) .* 1 of 1 are new"):
        scaler.step(optimizer)
    assert p.item() == 1.0


# --- one unscaled with another optimizer ----------------------------------------------------------


# --- steps that raise -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_fused_step_that_raised_after_it_has_divided(is_warm: bool) -> None:
    p, scaler = param(), GradScaler()
    optimizer = SGD([p], 0.25, fused=True)
    if is_warm:
        warm(scaler, optimizer)
    backward(scaler, p)
    hook = optimizer.register_step_post_hook(raiser(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    hook.remove()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(CallOrderError, match=r"may have divided some of them by the scale"):
            call(optimizer)
    optimizer.zero_grad()
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == 0.5


def test_a_skipped_first_step_of_a_fused_sgd_leaves_no_momentum() -> None:
    """Its buffers are made of memory as it was found."""
    dirt = [torch.full((1000,), 7e30) for _ in range(60)]
    del dirt
    p, scaler = param(*[0.0] * 1000), GradScaler()
    optimizer = SGD([p], 1.0, momentum=0.9, fused=True)
    backward(scaler, p, math.nan)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, p)
    scaler.step(optimizer)
    assert p.unique().tolist() == [-1.0]


# --- what the outcome says of them ----------------------------------------------------------------


@fused_or_not
def test_the_norm_is_that_before_clipping(fused: bool) -> None:
    p, scaler = param(1.0, 1.0, 1.0, 1.0), GradScaler()
    optimizer = SGD([p], 1.0, fused=fused)
    backward(scaler, p, 3.0)
    scaler.step(optimizer, max_norm=0.25)
    scaler.update()
    assert scaler.outcome(optimizer).norm == scaler.history()[-1].norm == 6.0
    assert p.grad.norm().item() == pytest.approx(0.25, rel=1e-5)


@fused_or_not
def test_a_norm_that_is_read_late_is_that_of_the_step(fused: bool) -> None:
    p, scaler = param(1.0, 1.0, 1.0, 1.0), GradScaler()
    optimizer = SGD([p], 1.0, fused=fused)
    warm(scaler, optimizer)
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()
    outcome = scaler.outcome(optimizer)
    scaler.scale(p.sum())
    scaler.unscale_(optimizer)  # once more, without zero_grad()
    with pytest.raises(CallOrderError, match="not measured and are gone"):
        _ = outcome.norm


def test_a_fused_optimizer_that_may_not_write_gradients_back() -> None:
    class Own(SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:
            """Leave the gradients alone."""

    p, scaler = param(), GradScaler()
    optimizer = Own([p], 1.0)
    for _ in range(NUM_STEPS + 1):
        optimizer.zero_grad()
        backward(scaler, p)
        scaler.step(optimizer)
        scaler.update()
    with pytest.raises(CallOrderError, match=r"let step\(\) measure them"):
        _ = scaler.outcome(optimizer).norm
    optimizer.zero_grad()
    backward(scaler, p)
    p.grad.fill_(math.inf)
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).culprits == ["param_groups[0]['params'][0]"]


def test_two_modules_with_parameters_of_the_same_name() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    scaler, optimizer = GradScaler(), SGD([*first.parameters(), *second.parameters()], 0.1)
    scaler.watch(first)
    scaler.watch(second)
    scaler.scale(second(first(torch.ones(1, 2))).sum()).backward()
    second.weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    outcome = scaler.outcome(optimizer)
    assert outcome.culprits == ["Linear[1].weight"]
    assert [*outcome.norms] == [f"Linear[{n}].{p}" for n in (0, 1) for p in ("weight", "bias")]


# --- settings -------------------------------------------------------------------------------------


def test_a_fused_optimizer_that_a_checkpoint_made_plain() -> None:
    p, scaler = param(), GradScaler()
    optimizer = SGD([p], 1.0, fused=True)
    optimizer.load_state_dict(SGD([param()], 1.0).state_dict())
    backward(scaler, p)
    scaler.step(optimizer)
    assert p.item() == 0.0


def test_nothing_is_suspected_while_the_learning_rate_is_0() -> None:
    p, scaler = param(), GradScaler()
    optimizer = SGD([p], 0.0)
    for _ in range(NUM_STEPS + 1):
        optimizer.zero_grad()
        backward(scaler, p, 1e-6)
        scaler.step(optimizer)
        scaler.update()


def test_a_bad_loss_that_was_given_up_blames_no_later_step() -> None:
    p, scaler = param(), GradScaler()
    optimizer = SGD([p], 0.1)
    scaler.scale(p.sum() * math.inf)
    scaler.update(new_scale=scaler.get_scale())
    scaler.scale(p.sum()).backward()
    p.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.outcome(optimizer).reason == "overflow"
