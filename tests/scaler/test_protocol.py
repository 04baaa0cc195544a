"""Optimizers that handle the scale themselves, syncs, and the names that other libraries call."""

import math
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.training import quiet
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep._gradients import scalars
from halfstep._scaler import GradScaler


class CountItems(TorchDispatchMode):
    """Counts how often a value is read back from a tensor (on a GPU each one is a sync)."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
            torch.ops.aten.equal.default,
        )
        return func(*args, **(kwargs or {}))


class Attributes(torch.optim.SGD):
    """The present protocol: notes the attributes it was called with."""

    _step_supports_amp_scaling = True
    fail = False

    def step(self, closure: None = None) -> str:  # type: ignore[override]
        self.seen = (self.grad_scale, self.found_inf)
        if self.fail:
            raise KeyError("broken optimizer")
        return "stepped"


class Keyword(Attributes):
    """The older protocol: gets the scaler and does everything itself."""

    def step(self, closure: None = None, *, grad_scaler: GradScaler) -> str:  # type: ignore[override]
        raise AssertionError


def scaled_backward(scaler: GradScaler, param: torch.nn.Parameter, value: float = 1.0) -> None:
    """Gradients of 1, times the scale; ``value`` instead if it is inf or NaN."""
    scaler.scale(param.sum()).backward()
    if not math.isfinite(value):
        param.grad.fill_(value)


@pytest.fixture
def param() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("value", [1.0, math.inf])
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("own", [None, 3.0])
def test_attributes(param, value, unscale_first, own):
    optimizer = Attributes([param], lr=1.0)
    scaler = GradScaler(init_scale=8.0)
    scaled_backward(scaler, param, value)
    if unscale_first:
        scaler.unscale_(optimizer)
    if own is not None:
        optimizer.grad_scale = torch.tensor(own)
    assert scaler.step(optimizer) == "stepped"
    grad_scale, found_inf = optimizer.seen
    assert bool(found_inf) == math.isinf(value)
    assert grad_scale == (own if unscale_first else 8.0 * (own or 1.0))
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    scaler.update()
    assert scaler.get_scale() == (4.0 if math.isinf(value) else 8.0)


def test_a_step_that_raises_leaves_no_attributes_and_can_be_repeated(param):
    optimizer = Attributes([param], lr=1.0)
    scaler = GradScaler(init_scale=8.0)
    scaled_backward(scaler, param)
    optimizer.fail = True
    with pytest.raises(KeyError, match="broken optimizer"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    optimizer.fail = False
    assert scaler.step(optimizer) == "stepped"
    assert optimizer.seen[0] == 8.0
    scaler.update()


@pytest.mark.parametrize("entry", [1.0, 3e38, math.inf])
def test_below_one_the_division_is_foreseen(param: torch.nn.Parameter, entry: float) -> None:
    optimizer = Attributes([param], lr=1.0)
    scaler = GradScaler(init_scale=0.5)
    scaled_backward(scaler, param)
    param.grad.fill_(entry)
    scaler.step(optimizer)
    grad_scale, found_inf = optimizer.seen
    assert grad_scale == 0.5
    assert found_inf == float(entry > 1.0)
    assert torch.equal(param.grad, torch.full((2,), entry))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_below_one_a_fused_optimizer_skips(param, make, bad):
    """PyTorch's fused kernels skip if found_inf is exactly 1; two looks must not make it 2."""
    optimizer = make([param], lr=1.0, fused=True)
    scaler = quiet(init_scale=0.5)
    scaled_backward(scaler, param, bad)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.zeros(2))


def test_an_overflow_on_each_of_two_devices_counts_as_one() -> None:
    found = scalars.combine([torch.ones(()), torch.zeros(()), torch.ones(())], torch.device(DEVICE))
    assert found == 1.0


def test_the_older_protocol_is_refused(param: torch.nn.Parameter) -> None:
    scaler = GradScaler()
    scaled_backward(scaler, param)
    with pytest.raises(TypeError, match=r"step\(Keyword\).*Cure: leave _step_supports_amp"):
        scaler.step(Keyword([param], lr=1.0))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("waiting_device")
def test_syncs(fused: bool) -> None:
    params = [
        torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)
    ]
    optimizer = torch.optim.SGD(params, lr=0.1, fused=fused)
    scaler = GradScaler()
    for _ in range(4):  # the first steps are also looked at for clipping
        for param in params:
            scaled_backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for param in params:
        scaled_backward(scaler, param)
    with CountItems() as items:
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        scaler.update(2.0)
        scaler.set_growth_interval(3)
        scaler.load_state_dict(GradScaler().state_dict())
    assert items.count == 0  # a plain step reads several numbers at once, which is not counted
    with CountItems() as items:
        scaler.get_scale()
    assert items.count == 1


def test_step_goes_through_the_instance(param: torch.nn.Parameter) -> None:
    """accelerate replaces optimizer.step on the instance, and passes closure=None positionally."""
    optimizer = torch.optim.SGD([param], lr=1.0)
    called = []
    optimizer.step = lambda *args: called.append(args)  # type: ignore[method-assign]
    scaler = GradScaler()
    for value in (1.0, math.inf):
        scaled_backward(scaler, param, value)
        scaler.step(optimizer, None)
        scaler.update()
    assert called == [(None,)]


def test_accelerate_creates_the_scale_early() -> None:
    scaler = GradScaler(DEVICE, init_scale=8.0)
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    assert scaler._get_scale_async() == 8.0
    without_device = GradScaler()
    assert without_device._device is None
    without_device._lazy_init_scale_growth_tracker(without_device._device)
    assert without_device._device == without_device._get_scale_async().device.type


def test_the_scale_is_created_by_the_first_loss(param: torch.nn.Parameter) -> None:
    scaler = GradScaler()
    assert scaler._get_scale_async() is None
    assert scaler.get_scale() == 65536.0
    scaler.scale([{"loss": param.sum()}])
    assert scaler._device == DEVICE
    assert scaler._get_scale_async().dtype == torch.float32


class Delegating:
    """A wrapper that hands on what it does not have, as proxies of optimizers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_a_fused_optimizer_behind_a_wrapper_is_unscaled_and_skipped(value: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Delegating(torch.optim.SGD([parameter], lr=1.0, fused=True))
    scaler = GradScaler(init_scale=4.0)
    scaled_backward(scaler, parameter, value)
    scaler.step(optimizer)  # type: ignore[arg-type]
    scaler.update()
    assert parameter.item() == (-1.0 if value == 1.0 else 0.0)


def test_found_inf_that_was_added_up_between_ranks_still_skips() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    scaler = GradScaler(init_scale=4.0)
    scaled_backward(scaler, parameter, float("inf"))
    scaler.unscale_(optimizer)
    for found in scaler._found_inf_per_device(optimizer).values():
        found.mul_(2)  # what an all-reduce with SUM over two ranks does
    scaler.step(optimizer)
    assert parameter.item() == 0.0


def test_a_first_loss_in_inference_mode_does_no_harm() -> None:
    scaler = GradScaler()
    with torch.inference_mode():
        scaler.scale(torch.ones(()))
    parameter = torch.nn.Parameter(torch.ones(1))
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad.item() == 65536.0


def test_attributes_that_others_read(param: torch.nn.Parameter) -> None:
    scaler, optimizer = GradScaler(), torch.optim.SGD([param], lr=1.0)
    assert scaler._scale is scaler._growth_tracker is None
    scaled_backward(scaler, param)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler._scale, scaler._growth_tracker) == (65536.0, 1)


@pytest.mark.parametrize("place", ["attribute", "group"])
def test_an_optimizer_may_stop_to_handle_the_scale(param: torch.nn.Parameter, place: str) -> None:
    """As a state that is loaded into a fused one does; each step asks anew."""
    optimizer, scaler = torch.optim.SGD([param], lr=1.0, fused=True), GradScaler()
    for number in range(4):
        if number == 2 and place == "attribute":
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if number >= 2:
            optimizer.param_groups[0]["fused"] = False
        optimizer.zero_grad()
        scaled_backward(scaler, param, math.inf if number == 3 else 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(param, torch.full((2,), -3.0))
    assert scaler.outcome(optimizer).skipped
