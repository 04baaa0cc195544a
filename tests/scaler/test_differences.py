"""Where halfstep.GradScaler differs from torch.amp.GradScaler on purpose, one entry a difference.

Each entry has two halves: ours is right, and PyTorch still has it. When a new PyTorch has fixed
one, the second half skips with a notice instead of failing. docs/coming_from.md has one row an
entry.
"""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.scaler.containers import OfFirst
from tests.training import closure_of, one_parameter, quiet, take_step

from halfstep._scaler import GradScaler
from halfstep.errors import CallOrderError

DOCS = Path(__file__).parents[2] / "docs" / "coming_from.md"


def torch_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE, **kwargs)


def stepped_by_a_container(scaler: Any) -> tuple[float, float]:
    """Return two parameters of two optimizers in a container that shows the first one's groups."""
    (first, optimizer), (second, other) = (one_parameter(torch.zeros(2)) for _ in range(2))
    scaler.scale(first.sum() + second.sum()).backward()
    scaler.step(OfFirst([optimizer, other]))
    return first[0].item(), second[0].item()


def statistics_after_a_broken_batch(make_scaler: Callable[[torch.nn.Module], Any]) -> list[float]:
    model = torch.nn.BatchNorm1d(2)
    scaler, optimizer = make_scaler(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.full((2, 2), math.nan)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.running_mean is not None
    return model.running_mean.tolist()


def weight_after_a_division_by_0(scaler: Any) -> float:
    param, optimizer = one_parameter(torch.ones(1))
    scaler.scale((param * 0.0).sum()).backward()
    scaler.unscale_(optimizer)
    param.grad.div_(param.grad.norm())
    scaler.step(optimizer)
    scaler.update()
    return param.item()


def iterate(scaler: Any, param: torch.nn.Parameter, optimizer: Any, value: float = 1.0) -> None:
    """One iteration with gradients of 1, or of inf or NaN, from a finite loss."""
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    param.grad.mul_(value)
    scaler.step(optimizer)
    scaler.update()


def raises(error: type[BaseException], function: Callable[[], object]) -> bool:
    try:
        function()
    except error:
        return True
    return False


# --- one function a difference: what a scaler does, to be judged for ours and for theirs ----------


def nan_for_ever(scaler: Any) -> tuple[float, bool]:
    param, optimizer = one_parameter(torch.ones(2))
    for _ in range(200):
        iterate(scaler, param, optimizer, math.nan)
    iterate(scaler, param, optimizer, 1.0)
    return scaler.get_scale(), bool(param.isfinite().all())


def inf_after_unscaling(scaler: Any, fused: bool = False) -> bool:
    param, optimizer = one_parameter(torch.ones(2), fused=fused)
    scaler.scale(param.sum())
    param.grad = torch.full((2,), 3e38)
    scaler.step(optimizer)
    scaler.update()
    return bool(param.isfinite().all())


def positional_closure(scaler: Any) -> float:
    """The length of a step that should be 1."""
    param, optimizer = one_parameter(torch.zeros(2))
    scaler.scale(param.sum()).backward()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.sum()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    return -param[0].item()


def keyword_closure(scaler: Any) -> None:
    param, optimizer = one_parameter(torch.zeros(2))
    scaler.scale(param.sum()).backward()
    optimizer.zero_grad()
    scaler.step(optimizer, closure=closure_of(scaler, param.sum))


def schedule(scaler: Any) -> tuple[bool, float]:
    """Whether a skipped first step makes a warning, and the learning rate after it."""
    param, optimizer = one_parameter(torch.ones(2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iterate(scaler, param, optimizer, math.inf)
        if hasattr(scaler, "step_scheduler"):
            scaler.step_scheduler(scheduler)
        else:
            scheduler.step()
    return bool(caught), scheduler.get_last_lr()[0]


def shared_parameter(scaler: Any) -> float:
    """The gradient, which is 1, after both of its optimizers have unscaled it."""
    param, first = one_parameter(torch.zeros(2))
    second = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(first)
    scaler.unscale_(second)
    return param.grad[0].item()


def wrapped_optimizer(scaler: Any) -> float:
    param, inner = one_parameter(torch.zeros(2))
    wrapper = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    wrapper.param_groups = inner.param_groups
    scaler.scale(param.sum()).backward()
    scaler.unscale_(wrapper)
    scaler.step(inner)
    return -param[0].item()


def clipped_too_early(scaler: Any) -> int:
    """Number of warnings."""
    param, optimizer = one_parameter(torch.zeros(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(param[0] + step * param[1]).backward()
            torch.nn.utils.clip_grad_norm_([param], 1.0)
            scaler.step(optimizer)
            scaler.update()
    return len(caught)


def bad_loss(scaler: Any) -> float:
    """The scale after 7 losses that are inf, and a good one."""
    param, optimizer = one_parameter(torch.ones(2))
    for factor in [math.inf] * 7 + [1.0]:
        take_step(scaler, optimizer, (param * factor).sum())
    return scaler.get_scale()


def gradient_after_a_skip(scaler: Any, fused: bool) -> float:
    param, optimizer = one_parameter(torch.zeros(2), fused=fused)
    scaler.scale(param.sum()).backward()
    param.grad[0] = math.inf
    scaler.step(optimizer)
    return param.grad[1].item()


def closure_none(scaler: Any) -> None:
    param, optimizer = one_parameter(torch.zeros(2))
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer, closure=None)


def float16_message(scaler: Any) -> str:
    param, optimizer = one_parameter(torch.zeros(2, dtype=torch.float16))
    scaler.scale(torch.ones(()))
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"(?i)fp16|float16") as error:
        scaler.step(optimizer)
    return str(error.value)


def step_without_gradients(scaler: Any, fused: bool) -> None:
    _, optimizer = one_parameter(torch.zeros(2), fused=fused)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def bad_numbers(constructor: Any) -> int:
    """How many of the bad numbers of A28 are refused with a ValueError."""
    bad = {"init_scale": 0.0, "backoff_factor": -1.0, "growth_interval": 0}
    refused = sum(
        raises(ValueError, lambda k=k, v=v: constructor(**{k: v})) for k, v in bad.items()
    )
    for value in (math.nan, -3.0):
        scaler = constructor()
        scaler.scale(torch.ones(()))
        refused += raises(ValueError, lambda s=scaler, v=value: s.update(v))
    return refused


def scale_of_update_3(scaler: Any) -> float:
    scaler.scale(torch.ones(()))
    scaler.update(3)
    return scaler.get_scale()


def lowered_interval(scaler: Any) -> float:
    param, optimizer = one_parameter(torch.zeros(2))
    for _ in range(3):
        iterate(scaler, param, optimizer)
    scaler.set_growth_interval(2)
    for _ in range(5):
        iterate(scaler, param, optimizer)
    return scaler.get_scale()


def complex_gradients(scaler: Any) -> None:
    param, optimizer = one_parameter(torch.zeros(2, dtype=torch.complex64))
    scaler.scale(param.abs().sum()).backward()
    scaler.step(optimizer)


def two_devices_overflow(scaler: Any) -> bool:
    """Both devices of one fused optimizer met an inf; is the step skipped?"""
    param, optimizer = one_parameter(torch.zeros(2), fused=True)
    scaler.scale((param * math.inf).sum()).backward()
    scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    found["stands in for a second device"] = torch.ones(())
    scaler.step(optimizer)
    return torch.equal(param, torch.zeros(2))


def failed_fused_step_is_clean(scaler: Any) -> bool:
    class Failing(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: None = None) -> None:
            raise KeyError

    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = Failing([param], lr=1.0)
    scaler.scale(param.sum()).backward()
    assert raises(KeyError, lambda: scaler.step(optimizer))
    return not hasattr(optimizer, "grad_scale")


def keyword_raises(scaler: Any) -> bool:
    class Keyword(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: None = None, *, grad_scaler: Any) -> None:
            grad_scaler.unscale_(self)

    param = torch.nn.Parameter(torch.zeros(2))
    scaler.scale(param.sum()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return raises(TypeError, lambda: scaler.step(Keyword([param], lr=1.0)))


def sparse_float32_sum(scaler: Any) -> bool:
    """Entries that are finite one by one, at the same index, and overflow when added."""
    param, optimizer = one_parameter(torch.zeros(2))
    scaler.scale(param.sum())
    param.grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([3e38, 3e38]), (2,), check_invariants=True
    )
    scaler.step(optimizer)
    return bool(param.isfinite().all())


def bare_and_cuda() -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return not torch.amp.GradScaler("cuda").is_enabled() and len(caught) == 1


def unpack_dict() -> bool:
    return not isinstance(torch_scaler().scale({"loss": torch.ones(())}), dict)


def new_backward_after_unscaling(scaler: Any) -> float:
    """The length of a step that should be 1; what a user does who starts the iteration again."""
    param, optimizer = one_parameter(torch.zeros(2))
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    return -param[0].item()


def step_after_the_scale_was_set(scaler: Any) -> float:
    """The length of a step that should be 1."""
    param, optimizer = one_parameter(torch.zeros(2))
    take_step(scaler, optimizer, param.sum() * 0.0)
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.update(256.0)
    scaler.step(optimizer)
    return -param[0].item()


def accumulated_over_updates(scaler: Any) -> float:
    """The length of a step from two gradients of 1, while another optimizer steps twice."""
    (often, stepping), (rarely, waiting) = (one_parameter(torch.zeros(2)) for _ in range(2))
    take_step(scaler, waiting, rarely.sum() * 0.0)
    for _ in range(2):
        take_step(scaler, stepping, (often + rarely).sum())
    scaler.step(waiting)
    return -rarely[0].item()


def scale_is_traced(scaler: Any) -> bool:
    scaler.scale(torch.ones(()))  # makes its tensors
    scale = torch.compile(lambda loss: scaler.scale(loss), backend="eager", fullgraph=True)
    return not raises(torch._dynamo.exc.Unsupported, lambda: scale(torch.ones(())))


@dataclass(frozen=True)
class Difference:
    """``key`` is the first column in docs/coming_from.md; both halves return True for now."""

    key: str
    ours_is_right: Callable[[], bool]
    torch_still_has_it: Callable[[], bool]


no_cuda = not torch.cuda.is_available()
DIFFERENCES = [
    Difference(
        "A1",
        lambda: nan_for_ever(quiet()) == (65536.0, True),
        lambda: nan_for_ever(torch_scaler()) == (0.0, False),
    ),
    Difference(
        "A2",
        lambda: all(inf_after_unscaling(quiet(init_scale=0.25), f) for f in (False, True)),
        lambda: not inf_after_unscaling(torch_scaler(init_scale=0.25)),
    ),
    Difference(
        "A3",
        lambda: positional_closure(GradScaler()) == 1.0,
        lambda: positional_closure(torch_scaler()) == 65536.0,
    ),
    Difference(
        "A3b",
        lambda: not raises(Exception, lambda: closure_none(GradScaler())),
        lambda: raises(RuntimeError, lambda: closure_none(torch_scaler())),
    ),
    Difference(
        "A3c",
        lambda: not raises(Exception, lambda: keyword_closure(GradScaler())),
        lambda: raises(RuntimeError, lambda: keyword_closure(torch_scaler())),
    ),
    Difference(
        "A4",
        lambda: schedule(GradScaler()) == (False, 1.0),
        lambda: schedule(torch_scaler()) == (True, 0.5),
    ),
    Difference(
        "A5",
        lambda: shared_parameter(GradScaler()) == 1.0,
        lambda: shared_parameter(torch_scaler()) == 2.0**-16,
    ),
    Difference(
        "A6",
        lambda: wrapped_optimizer(GradScaler()) == 1.0,
        lambda: wrapped_optimizer(torch_scaler()) == 2.0**-16,
    ),
    Difference(
        "A7",
        lambda: clipped_too_early(GradScaler()) == 1,
        lambda: clipped_too_early(torch_scaler()) == 0,
    ),
    Difference(
        "A9",
        lambda: bad_loss(GradScaler()) == 65536.0,
        lambda: bad_loss(torch_scaler()) == 512.0,
    ),
    Difference(
        "A11",
        lambda: raises(UserWarning, lambda: GradScaler().load_state_dict({})),
        lambda: raises(RuntimeError, lambda: torch_scaler().load_state_dict({})),
    ),
    Difference(
        "A12",
        lambda: "param_groups[0]['params'][0]" in float16_message(GradScaler()),
        lambda: float16_message(torch_scaler()) == "Attempting to unscale FP16 gradients.",
    ),
    Difference(
        "A12b",
        lambda: raises(CallOrderError, lambda: step_without_gradients(GradScaler(), fused=True)),
        lambda: not raises(Exception, lambda: step_without_gradients(torch_scaler(), fused=True)),
    ),
    Difference("A28", lambda: bad_numbers(GradScaler) == 5, lambda: bad_numbers(torch_scaler) == 0),
    Difference(
        "A28b",
        lambda: scale_of_update_3(GradScaler()) == 3.0,
        lambda: raises(AttributeError, lambda: scale_of_update_3(torch_scaler())),
    ),
    Difference(
        "A28c",
        lambda: GradScaler().scale({"loss": torch.ones(())}) == {"loss": 65536.0},
        unpack_dict,
    ),
    Difference(
        "A28d",
        lambda: GradScaler(growth_factor=1.0, backoff_factor=1.0).get_scale() == 65536.0,
        lambda: raises(AssertionError, lambda: torch_scaler(growth_factor=1.0)),
    ),
    Difference(
        "A29",
        lambda: lowered_interval(GradScaler(init_scale=4.0)) > 4.0,
        lambda: lowered_interval(torch_scaler(init_scale=4.0)) == 4.0,
    ),
    Difference(
        "A30",
        lambda: GradScaler(enabled=False).get_growth_factor() == 2.0,
        lambda: raises(AttributeError, torch_scaler(enabled=False).get_growth_factor),
    ),
    Difference(
        "A30b",
        lambda: not no_cuda or raises(ValueError, lambda: GradScaler("cuda")),
        lambda: not no_cuda or bare_and_cuda(),
    ),
    Difference(
        "A31",
        lambda: not raises(Exception, lambda: complex_gradients(GradScaler())),
        lambda: raises(RuntimeError, lambda: complex_gradients(torch_scaler())),
    ),
    Difference(
        "A32",
        lambda: scale_is_traced(GradScaler()),
        lambda: not scale_is_traced(torch_scaler()),
    ),
    Difference(
        "A33",
        lambda: {gradient_after_a_skip(GradScaler(), f) for f in (False, True)} == {65536.0},
        lambda: {gradient_after_a_skip(torch_scaler(), f) for f in (False, True)} == {1.0, 65536.0},
    ),
    Difference(
        "S1",
        lambda: GradScaler().scale(torch.ones(1, dtype=torch.float16)).item() == 65536.0,
        lambda: torch_scaler().scale(torch.ones(1, dtype=torch.float16)).item() == math.inf,
    ),
    Difference(
        "S2",
        lambda: two_devices_overflow(GradScaler()),
        lambda: not two_devices_overflow(torch_scaler()),
    ),
    Difference(
        "S3",
        lambda: failed_fused_step_is_clean(GradScaler()),
        lambda: not failed_fused_step_is_clean(torch_scaler()),
    ),
    Difference(
        "S4", lambda: keyword_raises(GradScaler()), lambda: not keyword_raises(torch_scaler())
    ),
    Difference(
        "S5",
        lambda: sparse_float32_sum(GradScaler(init_scale=1.0)),
        lambda: not sparse_float32_sum(torch_scaler(init_scale=1.0)),
    ),
    Difference(
        "S6",
        lambda: raises(CallOrderError, lambda: new_backward_after_unscaling(GradScaler())),
        lambda: new_backward_after_unscaling(torch_scaler()) == 65536.0,
    ),
    Difference(
        "S7",
        lambda: raises(CallOrderError, lambda: step_after_the_scale_was_set(GradScaler())),
        lambda: step_after_the_scale_was_set(torch_scaler()) == 256.0,
    ),
    Difference(
        "S8",
        lambda: raises(
            CallOrderError, lambda: accumulated_over_updates(GradScaler(growth_interval=1))
        ),
        lambda: accumulated_over_updates(torch_scaler(growth_interval=1)) == 0.75,
    ),
    Difference(
        "S9",
        lambda: stepped_by_a_container(GradScaler()) == (-1.0, -1.0),
        lambda: stepped_by_a_container(torch_scaler()) == (-1.0, -65536.0),
    ),
    Difference(
        "S10",
        lambda: statistics_after_a_broken_batch(lambda model: quiet(module=model)) == [0.0, 0.0],
        lambda: (
            not any(
                map(math.isfinite, statistics_after_a_broken_batch(lambda model: torch_scaler()))
            )
        ),
    ),
    Difference(
        "S11",
        lambda: math.isfinite(weight_after_a_division_by_0(quiet())),
        lambda: math.isnan(weight_after_a_division_by_0(torch_scaler())),
    ),
]

by_key = pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.key)


@by_key
def test_ours_is_right(difference: Difference) -> None:
    assert difference.ours_is_right()


@by_key
def test_torch_still_has_it(difference: Difference) -> None:
    if not difference.torch_still_has_it():
        pytest.skip(
            f"PyTorch {torch.__version__} has fixed {difference.key}: update docs/coming_from.md"
        )


def test_the_docs_list_the_same_differences() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("### The scaler")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| ([AS]\d+[a-z]?) \|", table, re.MULTILINE)
    assert rows == [difference.key for difference in DIFFERENCES]
