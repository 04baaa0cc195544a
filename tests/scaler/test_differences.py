"""Where halfstep.GradScaler differs from torch.amp.GradScaler on purpose, one entry a difference.

Each entry has two halves: ours is right, and PyTorch still has it. When a new PyTorch has fixed
one, the second half skips with a notice instead of failing. docs/coming_from.md has one row an
entry.
"""

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.scaler.containers import OfFirst
from tests.training import closure_of, one_parameter, quiet, take_step

from halfstep.errors import CallOrderError

DOCS = Path(__file__).parents[2] / "docs" / "coming_from.md"


def torch_scaler(*, device: str = DEVICE, **kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device, **kwargs)


def stepped_by_a_container(scaler: Any) -> tuple[float, float]:
    """Return two parameters of two optimizers in a container that shows the first one's groups."""
    (first, optimizer), (second, other) = (one_parameter(torch.zeros(2)) for _ in range(2))
    scaler.scale(first.sum() + second.sum()).backward()
    scaler.step(OfFirst([optimizer, other]))
    return first[0].item(), second[0].item()


def statistics_after_a_broken_batch(make: Callable[..., Any]) -> list[float]:
    model = torch.nn.BatchNorm1d(2)
    scaler = make() if make is torch_scaler else make(module=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.full((2, 2), math.nan)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
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


def inf_after_unscaling(make: Callable[..., Any]) -> tuple[bool, ...]:
    """Whether the parameter of a plain and of a fused optimizer stays finite."""
    finite = []
    for fused in (False, True):
        (param, optimizer), scaler = (
            one_parameter(torch.ones(2), fused=fused),
            make(init_scale=1 / 4),
        )
        scaler.scale(param.sum())
        param.grad = torch.full((2,), 3e38)
        scaler.step(optimizer)
        scaler.update()
        finite.append(bool(param.isfinite().all()))
    return tuple(finite)


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
        if not hasattr(scaler, "outcome") or scaler.outcome(optimizer).taken:
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


def gradients_after_a_skip(make: Callable[..., Any]) -> set[float]:
    """Of a plain and of a fused optimizer."""
    found = set()
    for fused in (False, True):
        (param, optimizer), scaler = one_parameter(torch.zeros(2), fused=fused), make()
        scaler.scale(param.sum()).backward()
        param.grad[0] = math.inf
        scaler.step(optimizer)
        found.add(param.grad[1].item())
    return found


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


def step_without_gradients(scaler: Any) -> None:
    _, optimizer = one_parameter(torch.zeros(2), fused=True)
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


NO_CUDA = not torch.cuda.is_available()


def of(program: Callable[[Any], Any], **options: Any) -> Callable[[Any], Any]:
    """Return the program of a scaler as one of what makes it."""
    return lambda make: program(make(**options))


# The first column in docs/coming_from.md, a program, what it returns with halfstep's scaler and
# with PyTorch's: a value, a predicate, or the error that it raises.
DIFFERENCES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "A1": (of(nan_for_ever), (65536.0, True), (0.0, False)),
    "A2": (inf_after_unscaling, (True, True), lambda found: not found[0]),
    "A3": (of(positional_closure), 1.0, 65536.0),
    "A3b": (of(closure_none), None, RuntimeError),
    "A3c": (of(keyword_closure), None, RuntimeError),
    "A4": (of(schedule), (False, 1.0), (True, 0.5)),
    "A5": (of(shared_parameter), 1.0, 2.0**-16),
    "A6": (of(wrapped_optimizer), 1.0, 2.0**-16),
    "A7": (of(clipped_too_early), 1, 0),
    "A9": (of(bad_loss), 65536.0, 512.0),
    "A11": (lambda make: make().load_state_dict({}), UserWarning, RuntimeError),
    "A12": (
        of(float16_message),
        lambda text: "param_groups[0]['params'][0]" in text,
        "Attempting to unscale FP16 gradients.",
    ),
    "A12b": (of(step_without_gradients), CallOrderError, None),
    "A28": (bad_numbers, 5, 0),
    "A28b": (of(scale_of_update_3), 3.0, AttributeError),
    "A28c": (
        lambda make: make().scale({"loss": torch.ones(())}),
        {"loss": 65536.0},
        lambda scaled: not isinstance(scaled, dict),
    ),
    "A28d": (
        lambda make: make(growth_factor=1.0, backoff_factor=1.0).get_scale(),
        65536.0,
        AssertionError,
    ),
    "A29": (of(lowered_interval, init_scale=4.0), lambda scale: scale > 4.0, 4.0),
    "A30": (lambda make: make(enabled=False).get_growth_factor(), 2.0, AttributeError),
    "A30b": (
        lambda make: make(device="cuda").is_enabled(),
        ValueError if NO_CUDA else True,
        UserWarning if NO_CUDA else True,
    ),
    "A31": (of(complex_gradients), None, RuntimeError),
    "A32": (of(scale_is_traced), True, False),
    "A33": (gradients_after_a_skip, {65536.0}, {1.0, 65536.0}),
    "S1": (lambda make: make().scale(torch.ones(1, dtype=torch.float16)).item(), 65536.0, math.inf),
    "S2": (of(two_devices_overflow), True, False),
    "S3": (of(failed_fused_step_is_clean), True, False),
    "S4": (of(keyword_raises), True, False),
    "S5": (of(sparse_float32_sum, init_scale=1.0), True, False),
    "S6": (of(new_backward_after_unscaling), CallOrderError, 65536.0),
    "S7": (of(step_after_the_scale_was_set), CallOrderError, 256.0),
    "S8": (of(accumulated_over_updates, growth_interval=1), CallOrderError, 0.75),
    "S9": (of(stepped_by_a_container), (-1.0, -1.0), (-1.0, -65536.0)),
    "S10": (
        statistics_after_a_broken_batch,
        [0.0, 0.0],
        lambda found: not any(map(math.isfinite, found)),
    ),
    "S11": (of(weight_after_a_division_by_0), math.isfinite, math.isnan),
}


def check(program: Callable[[Any], Any], make: Any, expected: Any) -> None:
    if isinstance(expected, type):
        with pytest.raises(expected):
            program(make)
    else:
        found = program(make)
        assert expected(found) if callable(expected) else found == expected


@pytest.mark.parametrize("key", DIFFERENCES)
def test_ours_is_right(key: str) -> None:
    program, expected, _ = DIFFERENCES[key]
    check(program, quiet, expected)


@pytest.mark.parametrize("key", DIFFERENCES)
def test_torch_still_has_it(key: str) -> None:
    program, _, expected = DIFFERENCES[key]
    try:
        check(program, torch_scaler, expected)
    except (AssertionError, pytest.fail.Exception):
        pytest.skip(f"PyTorch {torch.__version__} has fixed {key}: update docs/coming_from.md")


def test_the_docs_list_the_same_differences() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("### The scaler")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| ([AS]\d+[a-z]?) \|", table, re.MULTILINE)
    assert rows == [*DIFFERENCES]
