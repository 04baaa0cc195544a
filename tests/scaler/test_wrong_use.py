"""Wrong calls: the message, and that the scaler goes on as if nothing had happened."""

import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import one_parameter

from halfstep._scaler import GradScaler
from halfstep.errors import CallOrderError


class Setup:
    """A scaler, one parameter and its optimizer, and a check that training still works."""

    def __init__(self, fused: bool = False) -> None:
        self.scaler = GradScaler(init_scale=8.0)
        self.param = torch.nn.Parameter(torch.zeros(2, 3))
        self.unused = torch.nn.Parameter(torch.zeros(4))
        self.optimizer = torch.optim.SGD([self.param, self.unused], lr=1.0, fused=fused)

    def backward(self) -> None:
        self.scaler.scale(self.param.sum()).backward()

    def finish_iteration(self) -> None:
        """Go on from any point before step(): exactly one step with gradients of 1."""
        before = self.param.detach().clone()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        assert torch.equal(self.param, before - 1.0)
        assert self.scaler.get_scale() == 8.0


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(fused=request.param)


ORDERS = [
    (["grad"], "step", r"step\(SGD\) before scale\(\).*Call scaler.scale\(loss\)"),
    (["grad"], "unscale_", r"unscale_\(SGD\) before scale\(\).*Call scaler.scale\(loss\)"),
    ([], "update", r"update\(\): no gradients were checked"),
    (["backward"], "update", r"Call scaler.step\(optimizer\) for at least one"),
    (["backward", "step"], "step", r"step\(SGD\): step\(\) has already been called since"),
    (["backward", "step"], "unscale_", r"unscale_\(SGD\): step\(\) has already been called"),
    (
        *(["backward", "unscale_"], "unscale_"),
        r"unscale_\(SGD\): its gradients have already been unscaled since",
    ),
]


@pytest.mark.parametrize(("before", "call", "words"), ORDERS)
def test_order(setup: Setup, before: list[str], call: str, words: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "grad": lambda: setup.param.sum().backward(),
        "backward": setup.backward,
        "step": lambda: setup.scaler.step(setup.optimizer),
        "unscale_": lambda: setup.scaler.unscale_(setup.optimizer),
        "update": setup.scaler.update,
    }
    for each in before:
        calls[each]()
    param = setup.param.detach().clone()
    with pytest.raises(CallOrderError, match=words):
        calls[call]()
    assert torch.equal(setup.param, param)
    if "step" in before:
        setup.scaler.update()
    if "backward" not in before or "step" in before:
        setup.optimizer.zero_grad()
        setup.backward()
    setup.finish_iteration()


@pytest.mark.parametrize("unscale_first", [False, True])
def test_no_gradients(setup: Setup, unscale_first: bool) -> None:
    setup.scaler.scale(setup.param.sum())
    if unscale_first:
        setup.scaler.unscale_(setup.optimizer)
    with pytest.raises(CallOrderError) as error:
        setup.scaler.step(setup.optimizer)
    text = str(error.value)
    assert text.startswith("step(SGD): none of its 2 parameters has a gradient.")
    assert "Cause: backward() was not called on the scaled loss, or zero_grad()" in text
    assert "Cure: call scaler.scale(loss).backward() before step()" in text
    # Nothing is left of the failed call: the iteration has not begun.
    pickle.dumps(setup.scaler)
    # Gradients that come only now are scaled and must be unscaled, also after unscale_().
    setup.backward()
    setup.finish_iteration()


@pytest.mark.parametrize("kwargs", [{}, {"closure": None}])
def test_no_closure_is_no_closure(setup: Setup, kwargs: dict[str, Any]) -> None:
    setup.backward()
    setup.scaler.step(setup.optimizer, *([] if kwargs else [None]), **kwargs)
    assert torch.equal(setup.param, torch.full((2, 3), -1.0))


@pytest.mark.parametrize("method", ["step", "unscale_"])
def test_float16_gradients(method: str) -> None:
    setup = Setup()
    half = torch.nn.Parameter(torch.zeros(4, 5, dtype=torch.float16))
    optimizer = torch.optim.Adam([setup.unused, half])
    half.grad = torch.ones_like(half)
    setup.backward()
    saved = setup.scaler.state_dict()
    with pytest.raises(ValueError, match="Adam has float16 gradients") as error:
        getattr(setup.scaler, method)(optimizer)
    assert setup.scaler.state_dict() == saved
    where = torch.empty(0).device
    assert f"param_groups[0]['params'][1] (float16[4, 5] on {where})." in str(error.value)
    setup.scaler.watch(module := torch.nn.ParameterDict({"table": half}))
    with pytest.raises(ValueError, match=r"table \(float16\[4, 5\] on (cpu|sim:0|cuda:0)\)\."):
        getattr(setup.scaler, method)(optimizer)
    del module
    assert torch.equal(half.grad, torch.ones_like(half))
    setup.finish_iteration()


def test_a_fused_optimizer_may_have_float16_gradients() -> None:
    half, optimizer = one_parameter(torch.zeros(3, dtype=torch.float16), fused=True)
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(half.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(half, torch.full_like(half, -1.0))


@pytest.mark.parametrize(
    ("new_scale", "error", "words"),
    [
        (math.nan, ValueError, "new_scale is nan: pass a finite number"),
        (-3.0, ValueError, "new_scale is -3.0: a scale must lie"),
        (0, ValueError, "new_scale is 0: a scale must lie"),
        ("4", TypeError, "new_scale is '4' .str.: pass a number"),
        (True, TypeError, "new_scale is True"),
        (
            torch.ones(2),
            ValueError,
            r"new_scale is float32\[2\] on (cpu|sim:0|cuda:0) with requires_grad=False",
        ),
        (torch.ones((), requires_grad=True), ValueError, "with requires_grad=True: pass a number"),
        (
            torch.ones((), dtype=torch.bool),
            TypeError,
            r"bool\[\] on (cpu|sim:0|cuda:0): pass a real tensor",
        ),
        (torch.ones((), dtype=torch.complex64), TypeError, "complex64.* pass a real tensor"),
    ],
)
def test_new_scale(setup: Setup, new_scale: Any, error: type[Exception], words: str) -> None:
    setup.backward()
    with pytest.raises(error, match=words):
        setup.scaler.update(new_scale)
    setup.finish_iteration()


def test_new_scale_before_the_first_loss() -> None:
    setup = Setup()
    with pytest.raises(CallOrderError, match=r"the scale is not on any device yet\."):
        setup.scaler.update(torch.tensor(4.0))
    setup.scaler.update(4.0)
    assert setup.scaler.get_scale() == 4.0
    assert setup.scaler.scale(torch.tensor(1.0)) == 4.0


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"init_scale": 0}, "init_scale is 0: a scale must lie"),
        ({"init_scale": math.nan}, "init_scale is nan"),
        ({"backoff_factor": -1}, "backoff_factor is -1.0: it must be > 0 and <= 1"),
        ({"growth_factor": 0.5}, "growth_factor is 0.5: it must be >= 1"),
        ({"growth_interval": 0}, "growth_interval is 0: it must lie between 1"),
        ({"device": "gpu"}, "GradScaler.device='gpu'.: no such device; did you mean 'cuda'"),
    ],
)
def test_constructor(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GradScaler(**kwargs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not here")
def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ValueError, match=r"sees no cuda device on this machine\."):
        GradScaler("cuda")
    disabled = GradScaler("cuda", enabled=False)
    assert not disabled.is_enabled()


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [("growth_factor", 0.5, 3.0), ("backoff_factor", 0.0, 0.75), ("growth_interval", 0, 3)],
)
@pytest.mark.parametrize("enabled", [False, True])
def test_getters_and_setters(name: str, bad: float, good: float, enabled: bool) -> None:
    scaler = GradScaler(enabled=enabled)
    getter: Callable[[], float] = getattr(scaler, f"get_{name}")
    setter: Callable[[float], None] = getattr(scaler, f"set_{name}")
    default = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}[name]
    assert getter() == default
    with pytest.raises(ValueError, match=f"{name} is"):
        setter(bad)
    assert getter() == default
    setter(good)
    assert getter() == good


def test_disabled() -> None:
    """Every method works, and nothing is scaled."""
    scaler = GradScaler(enabled=False)
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    loss = torch.ones((), requires_grad=True)
    assert scaler.scale(loss) is loss
    param, optimizer = one_parameter(torch.full((2,), math.inf))
    param.grad = torch.full((2,), math.inf)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.isnan().all()
    assert scaler.step(optimizer, lambda: 42.0) == 42.0
    weight, optimizer = one_parameter(torch.zeros(1))
    scaler.step(optimizer, lambda: (weight.sum() * 100).backward(), max_norm=1.0)
    assert weight.item() == pytest.approx(-1.0, rel=1e-5)
    scaler.update()
    scaler.update(3.0)
    scaler.load_state_dict({})
    scaler.load_state_dict(GradScaler().state_dict())
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    assert scaler.get_scale() == 1.0
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()
    assert not GradScaler(None, 1.0, 2.0, 0.5, 1, False).is_enabled()


def test_every_public_method_of_torch_is_there_also_when_disabled() -> None:
    names = {name for name in dir(torch.amp.GradScaler) if not name.startswith("_")}
    ours, disabled = (
        {name for name in dir(scaler) if not name.startswith("_")}
        for scaler in (GradScaler(), GradScaler(enabled=False))
    )
    assert names <= ours == disabled
    torchs = inspect.signature(torch.amp.GradScaler).parameters
    mine = list(inspect.signature(GradScaler).parameters.values())
    assert [p.name for p in mine[: len(torchs)]] == list(torchs)
    assert [p.default for p in mine][1:6] == [p.default for p in torchs.values()][1:]
    assert all(p.kind is p.KEYWORD_ONLY for p in mine[len(torchs) :])


def test_disabled_and_what_goes_beyond_torch() -> None:
    """Scripts that use the new calls run unchanged when the scaler is switched off."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler(enabled=False, module=model, min_scale=1.0)
    for attempt in scaler.retry(optimizer):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * 3.0).backward()
        scaler.step(optimizer, max_norm=0.5)
        scaler.update()
        assert attempt == 0
    outcome = scaler.outcome(optimizer)
    assert outcome.taken
    assert outcome.norm == pytest.approx(0.5, rel=1e-5)
    assert list(outcome.norms) == ["weight", "bias"]
    assert repr(outcome) == "Outcome(SGD: taken; scale 1 -> 1)"
    assert scaler.history() == []
    assert scaler.counts() == (0, 0, 0, None)
    assert repr(scaler) == "GradScaler(enabled=False)"


def test_a_subclass_can_be_switched_off() -> None:
    class Mine(GradScaler):
        def update(self, new_scale: Any = None) -> None:
            updates.append(new_scale)
            super().update(new_scale)

    updates: list[Any] = []
    scaler = Mine(enabled=False)
    param, optimizer = one_parameter(torch.ones(1))
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (param.item(), updates, scaler.get_scale()) == (0.0, [None], 1.0)
    copied = pickle.loads(pickle.dumps(GradScaler(enabled=False)))
    assert (copied.is_enabled(), copied.state_dict()) == (False, {})
