"""The same on CUDA devices: run by `make gpu`."""

import math
from typing import Any

import pytest
import torch
from tests.device import no_waits
from tests.training import mlp

from halfstep._gradients.gradients import largest_magnitudes, sums_of_squares
from halfstep._scaler import GradScaler
from halfstep._scaler.engine import scale_on
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.scale_state import Dynamic, ScaleState, Static, next_state

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
OPTIMIZERS = [
    (cls, impl)
    for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    for impl in ({}, {"foreach": True}, {"fused": True})
]


def make_model() -> torch.nn.Module:
    return mlp(8, 16, 1, between=torch.nn.ReLU).to(CUDA)


@pytest.mark.parametrize(("cls", "impl"), OPTIMIZERS)
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("init_scale", [2.0**16, 0.5])
def test_against_torch(cls, impl, unscale_first, init_scale):
    results = []
    for make_scaler in (GradScaler, torch.amp.GradScaler):
        scaler = make_scaler("cuda", init_scale=init_scale, growth_interval=2, backoff_factor=1 / 2)
        model = make_model()
        optimizer = cls(model.parameters(), lr=0.01, **impl)
        scales = []
        for i in range(6):
            loss = model(torch.full((4, 8), 0.1 * i, device=CUDA)).square().mean()
            scaler.scale(loss).backward()
            if i == 3:
                model[0].weight.grad[2, 1] = math.inf
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        results.append((scales, list(model.parameters())))
    (our_scales, ours), (their_scales, theirs) = results
    assert our_scales == their_scales
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_step_waits_for_nothing(fused: bool) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    scaler = GradScaler()
    scaler.scale(model(torch.ones(4, 8, device=CUDA)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaled = scaler.scale(model(torch.ones(4, 8, device=CUDA)).sum())
    scaled.backward()
    with no_waits():
        if fused:
            scaler.step(optimizer)
        else:
            scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match="synchronizing"):
                scaler.step(optimizer)
        scaler.update()
        scaler.update(4.0)
        scaler.set_growth_interval(1)


@pytest.mark.parametrize("kind", ["transposed", "sliced", "complex", "sparse", "bfloat16"])
def test_unscale(kind: str) -> None:
    grad = {
        "transposed": torch.randn(4, 6, device=CUDA).t(),
        "sliced": torch.randn(4, 6, device=CUDA)[:, ::2],
        "complex": torch.randn(5, dtype=torch.complex64, device=CUDA).conj(),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[1, 1, 3]]), torch.ones(3), (4,), device=CUDA, check_invariants=True
        ),
        "bfloat16": torch.randn(7, device=CUDA, dtype=torch.bfloat16),
    }[kind]
    expected = (grad.coalesce().to_dense() if grad.is_sparse else grad) / 8
    param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype, device=CUDA))
    param.grad = grad
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(torch.ones((), device=CUDA))
    scaler.unscale_(torch.optim.SGD([param]))
    assert param.grad is not None
    unscaled = param.grad.to_dense() if param.grad.is_sparse else param.grad
    assert torch.equal(unscaled.resolve_conj(), expected.resolve_conj())


@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.1, 0.3), (3.7, 0.999)])
def test_the_device_does_the_same_as_the_pure_state(factors: tuple[float, float]) -> None:
    schedule = Dynamic(*factors, growth_interval=2, trials=False)
    state = ScaleState.first(1000.1, schedule, min_scale=0.7)
    scale = scale_on(CUDA, LossScale(state))
    for found_inf in [False, False, True, False, True, True] + [True] * 20 + [False] * 100:
        state = next_state(state, found_inf=found_inf)
        scale.update([torch.tensor(float(found_inf), device=CUDA)])
        assert scale.value() == state.scale
    assert scale.read() == state


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("broken", [[], [0], [1], [0, 1]])
def test_two_devices(fused: bool, broken: list[int]) -> None:
    devices = [torch.device("cuda", i) for i in range(2)]
    params = [torch.nn.Parameter(torch.zeros(3, device=device)) for device in devices]
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = GradScaler(init_scale=8.0)
    losses = [param.sum() for param in params]
    for loss in scaler.scale(losses):
        loss.backward()
    for i in broken:
        params[i].grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    for param in params:
        assert torch.equal(param.cpu(), torch.full((3,), 0.0 if broken else -1.0))
    assert scaler.get_scale() == (4.0 if broken else 8.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_reductions_are_those_of_the_cpu(dtype: torch.dtype, bad: float | None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(n).to(dtype) for n in (0, 1, 1000, 70_000)]
    tensors.append(torch.randn(40, 50).to(dtype).t())
    if dtype == torch.float32:
        tensors.append(torch.full((3,), 3e38))
    if bad is not None:
        tensors[2][7] = bad
    for function in (sums_of_squares, largest_magnitudes):
        there = function([tensor.to(CUDA) for tensor in tensors]).cpu().double()
        here = function(tensors).double()
        assert torch.equal(there.isfinite(), here.isfinite())
        torch.testing.assert_close(
            there.nan_to_num(0, 0), here.nan_to_num(0, 0), rtol=2e-5, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_step_with_clipping_waits_for_nothing(cls: Any) -> None:
    model = make_model()
    optimizer = cls(model.parameters(), lr=0.01, fused=True)
    scaler = GradScaler(module=model, max_consecutive_skips=2, on_skips=lambda report: None)

    def step(bad: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 8, device=CUDA)).square().sum()).backward()
        if bad:
            model[0].weight.grad.fill_(math.inf)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()

    step(bad=False)
    with no_waits():
        for bad in (False, True, False):
            step(bad)
    history = scaler.history()
    assert [entry.taken for entry in history] == [True, True, False, True]
    assert scaler.outcome(optimizer).taken
    assert scaler.counts() == (3, 1, 0, None)


def test_the_message_comes_late_but_comes() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    reports: list[Any] = []
    scaler = GradScaler(module=model, max_consecutive_skips=2, on_skips=reports.append)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 8, device=CUDA)).square().sum() * math.nan).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
    assert [str(report.reason) for report in reports] == ["loss", "loss"]


@pytest.mark.parametrize("schedule", [Dynamic(), Dynamic(trials=False), Static()])
def test_every_schedule_with_known_flags(schedule: Any) -> None:
    state = ScaleState.first(2.0**16, schedule, max_scale=2.0**20)
    scale = scale_on(CUDA, LossScale(state))
    for number in range(60):
        found_inf = number % 7 in (3, 4) or 20 < number < 40
        state = next_state(state, found_inf=found_inf)
        scale.update(found_inf)
        assert scale.read() == state
        assert scale.value() == state.scale
