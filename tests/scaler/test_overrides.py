"""Methods that a subclass or a patch replaces, with torch.amp's scaler and with halfstep's.

Each idiom is made of either scaler and trained through overflows. Weights, scale and count must be
equal bit for bit, and so must what the overrides were given.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.training import Overflow, one_parameter
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from halfstep import GradScaler
from halfstep._scaler.scaler import AS_MADE
from halfstep.errors import CallOrderError

BASES: list[Any] = [torch.amp.GradScaler, GradScaler]
NUM_STEPS, BAD_STEPS = 9, (2, 6)


def found_in(state: Any) -> float:
    return sum(float(flag) for flag in state["found_inf_per_device"].values())


# --- idioms ---------------------------------------------------------------------------------------


def allows_float16(base: Any, *args: Any, **kwargs: Any) -> Any:
    """A patch of the object, for weights in float16."""
    scaler = base(*args, **kwargs)
    made, scaler.seen = scaler._unscale_grads_, []

    def unscale(optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        found = made(optimizer, inv_scale, found_inf, True)
        scaler.seen += [inv_scale.dtype, inv_scale.item(), found_inf.dtype, found_inf.item()]
        scaler.seen += [allow_fp16, [flag is found_inf for flag in found.values()]]
        return found

    scaler._unscale_grads_ = unscale
    return scaler


def divides_itself(base: Any, *args: Any, **kwargs: Any) -> Any:
    """A subclass that unscales without the inherited method, and skips one finite step."""

    class Own(base):  # type: ignore[misc]
        num_calls = 0

        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, _: bool) -> Any:
            self.num_calls += 1
            for param in optimizer.param_groups[0]["params"]:
                param.grad *= inv_scale
                found_inf.clamp_(min=float(not param.grad.isfinite().all()))
            if self.num_calls == 4:
                found_inf.fill_(1.0)
            return {found_inf.device: found_inf}

    return Own(*args, **kwargs)


def decides_itself(base: Any, *args: Any, **kwargs: Any) -> Any:
    """A subclass that steps by itself, has tensors of its own and its own update (hysteresis)."""

    class Own(base):  # type: ignore[misc]
        def _lazy_init_scale_growth_tracker(self, device: Any) -> None:
            super()._lazy_init_scale_growth_tracker(device)
            self.left = torch.tensor(2, device=device)
            self.seen: list[Any] = [str(device)]

        def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(found_in(state))
            return None if self.seen[-1] else optimizer.step(*args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            scale, tracker = self._check_scale_growth_tracker("update")
            found = torch.tensor(sum(map(found_in, self._per_optimizer_states.values())))
            self.left.fill_(self.left - 1 if found else 2)
            if found and self.left > 0:
                tracker.zero_()
            else:
                schedule = self._growth_factor, self._backoff_factor, self._growth_interval
                torch._amp_update_scale_(scale, tracker, found, *schedule)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return Own(*args, **kwargs)


def shares_flags(base: Any, *args: Any, **kwargs: Any) -> Any:
    """A subclass that writes to the flags after it unscaled, as a reduction over ranks does."""

    class Own(base):  # type: ignore[misc]
        num_calls = 0

        def unscale_(self, optimizer: Any) -> None:
            super().unscale_(optimizer)
            self.num_calls += 1
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.clamp_(min=float(self.num_calls == 4))

    return Own(*args, **kwargs)


def has_its_own_stages(base: Any, *args: Any, **kwargs: Any) -> Any:
    """A subclass whose unscale_ and step write the state of the optimizer."""

    class Own(base):  # type: ignore[misc]
        def unscale_(self, optimizer: Any) -> None:
            state = self._per_optimizer_states[id(optimizer)]
            assert state["stage"] is OptState.READY
            inverse, found = self._scale.double().reciprocal().float(), torch.zeros(())
            flags = self._unscale_grads_(optimizer, inverse, found, False)
            state["found_inf_per_device"], state["stage"] = flags, OptState.UNSCALED

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            state = self._per_optimizer_states[id(optimizer)]
            self.unscale_(optimizer)
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
            state["stage"] = OptState.STEPPED
            return result

    return Own(*args, **kwargs)


def unscales_in_its_own_way(base: Any, *args: Any, **kwargs: Any) -> Any:
    """The same, with the inherited step."""
    scaler = has_its_own_stages(base, *args, **kwargs)
    del type(scaler).step
    return scaler


def checks(base: Any, *args: Any, **kwargs: Any) -> Any:
    """A subclass that counts calls, and inherits what they do."""

    class Own(base):  # type: ignore[misc]
        seen: list[str] = []  # noqa: RUF012

        def _check_inf_per_device(self, optimizer: Any) -> Any:
            self.seen = [*self.seen, "check"]
            return super()._check_inf_per_device(optimizer)

        def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
            self.seen = [*self.seen, "step"]
            return super()._maybe_opt_step(*args, **kwargs)

    return Own(*args, **kwargs)


def patched(base: Any, *args: Any, **kwargs: Any) -> Any:
    """A patch of a class after it was made."""
    cls = type("Own", (base,), {})
    scaler = cls(*args, **kwargs)
    scaler.seen, made = [], base._unscale_grads_
    cls._unscale_grads_ = lambda self, *args: self.seen.append(args[3]) or made(self, *args)
    return scaler


IDIOMS = [
    allows_float16,
    divides_itself,
    decides_itself,
    shares_flags,
    has_its_own_stages,
    unscales_in_its_own_way,
    checks,
    patched,
]


# --- training -------------------------------------------------------------------------------------


def step_and_update(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def results_of(
    make: Callable[..., Any],
    base: Any,
    step: Callable[[Any, Any], None] = step_and_update,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[Any]:
    """Return the weights, the scale, the count, and what the overrides were given."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    scaler = make(base, DEVICE, init_scale=2.0**12, growth_interval=3)
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4, dtype=dtype)).square().mean()
        scaler.scale(Overflow.apply(loss) if index in BAD_STEPS else loss).backward()
        step(scaler, optimizer)
    weights = [param.tolist() for param in model.parameters()]
    seen = getattr(scaler, "seen", None)
    return [weights, scaler.get_scale(), scaler._get_growth_tracker(), seen]


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("make", IDIOMS)
def test_as_in_torch_amp(make: Any, options: Any) -> None:
    theirs, ours = (results_of(make, base, **options) for base in BASES)
    assert ours == theirs
    assert math.isfinite(sum(ours[0][1]))
    if make in (allows_float16, patched):
        assert ours[3]


def test_float16_weights() -> None:
    theirs, ours = (results_of(allows_float16, base, dtype=torch.float16) for base in BASES)
    assert ours == theirs
    with pytest.raises(ValueError, match=r"SGD has float16 gradients.*param_groups\[0\]"):
        results_of(checks, GradScaler, dtype=torch.float16)


def idiom_of_two_backward_passes(scaler: Any, optimizer: Any) -> None:
    """Removes the state, to unscale and clip the gradients of two losses one after the other."""
    params = optimizer.param_groups[0]["params"]
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 0.1)
    held = [param.grad for param in params]
    scaler._per_optimizer_states.pop(id(optimizer), None)
    optimizer.zero_grad()
    scaler.scale(sum(param.square().sum() for param in params)).backward()
    scaler.unscale_(optimizer)
    for param, grad in zip(params, held, strict=True):
        param.grad += grad.nan_to_num(0.0, 0.0, 0.0)
    step_and_update(scaler, optimizer)


def idiom_of_a_step_left_out(scaler: Any, optimizer: Any) -> None:
    """Resets the state instead of a step, so that the scale does not move."""
    scaler.unscale_(optimizer)
    if all(param.grad.isfinite().all() for param in optimizer.param_groups[0]["params"]):
        step_and_update(scaler, optimizer)
    else:
        state = scaler._per_optimizer_states[id(optimizer)]
        state["stage"], state["found_inf_per_device"] = OptState.READY, {}


def idiom_of_a_cleared_state(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states.clear()
    optimizer.zero_grad()
    scaler.scale(sum(param.sum() for param in optimizer.param_groups[0]["params"])).backward()
    step_and_update(scaler, optimizer)


def idiom_of_tensors_that_are_written_to(scaler: Any, optimizer: Any) -> None:
    step_and_update(scaler, optimizer)
    scaler._scale.clamp_(max=2.0**12)
    scaler._growth_tracker.clamp_(max=1)


def idiom_of_evaluations(scaler: Any, optimizer: Any) -> None:
    """Unscales in a closure of its own, and resets the stage before each evaluation."""

    def closure() -> Any:
        state = scaler._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.READY
        scaler.unscale_(optimizer)
        if found_in(scaler._per_optimizer_states[id(optimizer)]):
            optimizer.zero_grad()

    optimizer.step(closure)
    scaler.update()


@pytest.mark.parametrize(
    "step",
    [
        idiom_of_two_backward_passes,
        idiom_of_a_step_left_out,
        idiom_of_a_cleared_state,
        idiom_of_tensors_that_are_written_to,
        idiom_of_evaluations,
    ],
)
def test_states_that_are_written_to(step: Any) -> None:
    theirs, ours = (results_of(lambda base, *a, **k: base(*a, **k), base, step) for base in BASES)
    assert ours == theirs


# --- what only halfstep has -----------------------------------------------------------------------


def small(make: Any, value: float = 1.0) -> tuple[Any, Any, Any]:
    param, optimizer = one_parameter(torch.ones(2))
    scaler = make(GradScaler, init_scale=8.0)
    scaler.scale(param.sum() * value).backward()
    return param, optimizer, scaler


@pytest.mark.parametrize("make", [allows_float16, decides_itself, shares_flags, divides_itself])
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_an_outcome(make: Any, value: float) -> None:
    param, optimizer, scaler = small(make, value)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.outcome(optimizer).taken == (value == 1.0)
    assert torch.equal(param, torch.full((2,), 0.0 if value == 1.0 else 1.0))


def test_an_override_that_does_not_step_is_a_skipped_step() -> None:
    _, optimizer, scaler = small(lambda base, **kwargs: base(**kwargs))
    scaler._maybe_opt_step = lambda *args, **kwargs: "left out"
    assert scaler.step(optimizer) == "left out"
    scaler.update()
    assert scaler.outcome(optimizer).skipped


@pytest.mark.parametrize("make", [allows_float16, decides_itself, shares_flags])
def test_what_torch_amp_does_not_have_is_refused(make: Any) -> None:
    param, optimizer, scaler = small(make)
    calls: dict[Callable[[], Any], str] = {
        lambda: scaler.step(
            optimizer, max_norm=0.5
        ): "call scaler.unscale_(optimizer) and torch.nn",
        lambda: scaler.step(optimizer, lambda: param.sum()): "without a closure",
        lambda: scaler.step(optimizer, closure=lambda: param.sum()): "without a closure",
    }
    for call, cure in calls.items():
        with pytest.raises(
            CallOrderError, match=r"overrides .*\(\), so it steps as torch.amp"
        ) as error:
            call()
        assert cure in str(error.value)
    assert torch.equal(param.grad, torch.full((2,), 8.0))
    assert scaler.step(optimizer, None) is None  # accelerate passes None
    assert torch.equal(param, torch.zeros(2))
    with pytest.raises(CallOrderError, match="already been called"):
        scaler.step(optimizer)


def test_a_gradient_that_another_optimizer_has_unscaled() -> None:
    param, optimizer, scaler = small(allows_float16)
    scaler.step(optimizer)
    with pytest.raises(CallOrderError, match="would divide them again"):
        scaler.step(torch.optim.SGD([param], lr=1.0))


@pytest.mark.parametrize("base", BASES)
def test_reading_the_state_calls_what_is_overridden(base: Any) -> None:
    class Own(base):  # type: ignore[misc]
        def _get_scale_async(self) -> Any:
            return torch.tensor(3.0)

        def _get_growth_tracker(self) -> int:
            return 5

    scaler = Own(DEVICE)
    assert scaler.get_scale() == 3.0
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (3.0, 5)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_every_method_that_torch_amp_calls_is_called(base: Any, options: Any) -> None:
    called = set()

    def noting(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(base, name)(self, *args, **kwargs)

        return method

    own: Any = type("Own", (base,), {name: noting(name) for name in AS_MADE})
    results_of(lambda base, *args, **kwargs: own(*args, **kwargs), base, **options)
    own(DEVICE).state_dict()
    left_out = ["_check_inf_per_device"] if not options else ["unscale_", "_maybe_opt_step"]
    assert called == {*AS_MADE} - {*left_out}


# --- schedules and optimizers of other kinds ------------------------------------------------------


def plain(base: Any, **kwargs: Any) -> Any:
    """A subclass that allows float16 gradients, as in kohya's scripts."""

    class Own(base):  # type: ignore[misc]
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, _: Any) -> Any:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    return Own(DEVICE, **kwargs)


class Lookahead(torch.optim.Optimizer):
    """A wrapper that does not call ``Optimizer.__init__``."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state, self.defaults = defaultdict(dict), {}

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def without_hooks(optimizer: Any) -> Any:
    optimizer.step = MethodType(type(optimizer).step.__wrapped__, optimizer)
    return optimizer


class Slots:
    """A wrapper of another class, to which no attribute can be added."""

    __slots__ = ("__weakref__", "optimizer", "param_groups")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


class Forwards:
    """A wrapper of another class, whose attributes are those of the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__["optimizer"] = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.optimizer, name, value)


@pytest.mark.parametrize("make", [plain, decides_itself, checks])
@pytest.mark.parametrize("wrap", [Lookahead, without_hooks, Forwards, Slots])
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_a_step_is_seen_without_hooks(make: Any, wrap: Any, value: float) -> None:
    param, optimizer, scaler = small(make, value)
    wrapped = wrap(optimizer)
    before = dict(getattr(wrapped, "__dict__", {})), dict(vars(optimizer))
    scaler.step(wrapped)
    scaler.update()
    is_good = value == 1.0
    assert torch.equal(param, torch.full((2,), 0.0 if is_good else 1.0))
    assert scaler.outcome(wrapped).taken == is_good
    after = getattr(wrapped, "__dict__", {}), vars(optimizer)
    assert [each.get("step") for each in after] == [each.get("step") for each in before]


# --- fused optimizers -----------------------------------------------------------------------------


def test_a_fused_step_that_raised_is_not_repeated() -> None:
    param, _, scaler = small(plain)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)

    def fails(*_: Any) -> None:
        raise OSError("fails")

    handle = optimizer.register_step_post_hook(fails)
    with pytest.raises(OSError, match="fails"):
        scaler.step(optimizer)
    handle.remove()
    with pytest.raises(CallOrderError, match="may have divided some"):
        scaler.step(optimizer)


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_the_norms_of_a_fused_step(value: float) -> None:
    param, optimizer = one_parameter(torch.ones(2), fused=True)
    scaler = plain(GradScaler, init_scale=8.0)
    scaler.scale((param * torch.tensor([3.0, value])).sum()).backward()
    other = torch.nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [other]})
    other.grad = torch.full((1,), 8.0 * 5.0)
    scaler.step(optimizer)
    norms = [*scaler.outcome(optimizer).norms.values()]
    assert norms == [math.hypot(3.0, value), 5.0]


def test_a_second_optimizer_after_a_fused_step() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([param], lr=1.0, fused=fused) for fused in (True, False)]
    scaler = checks(GradScaler, init_scale=8.0)
    scaler.scale(param.sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert torch.equal(param, torch.full((2,), -1.0))


# --- the scale ------------------------------------------------------------------------------------


def updates_by_the_kernel(base: Any, **kwargs: Any) -> Any:
    """A subclass with an ``update`` of its own, without a floor."""

    class Own(base):  # type: ignore[misc]
        def update(self, new_scale: Any = None) -> None:
            scale, tracker = self._check_scale_growth_tracker("update")
            found = torch.tensor(sum(map(found_in, self._per_optimizer_states.values())))
            torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 100)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return Own(DEVICE, **kwargs)


def test_a_scale_below_the_floor_is_saved() -> None:
    param, optimizer = one_parameter(torch.ones(2))
    scaler = updates_by_the_kernel(GradScaler, init_scale=4.0)
    for _ in range(4):
        scaler.scale(param.sum() * math.nan).backward()
        step_and_update(scaler, optimizer)
        optimizer.zero_grad()
    assert scaler.get_scale() == 0.25
    for made in (GradScaler(), copy.deepcopy(scaler)):
        made.load_state_dict(scaler.state_dict())
        assert made.get_scale() == 0.25


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("make", [plain, checks, lambda base, **kwargs: base(DEVICE, **kwargs)])
def test_a_gradient_that_overflows_when_divided_by_a_written_scale(make: Any, options: Any) -> None:
    param, optimizer = one_parameter(torch.ones(2), **options)
    scaler = make(GradScaler, init_scale=8.0, on_skips=str)
    scaler.scale(param.sum() * 0.0).backward()
    step_and_update(scaler, optimizer)
    scaler._scale.fill_(0.25)
    scaler.scale(param.sum()).backward()
    param.grad = torch.full((2,), 3e38)
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).skipped
    assert torch.equal(param, torch.ones(2))


def test_a_scale_that_is_no_scale() -> None:
    param, optimizer, scaler = small(plain)
    scaler._scale.fill_(0.0)
    with pytest.raises(ValueError, match=r"scale is 0\.0"):
        scaler.step(optimizer)
    scaler.update(8.0)
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    step_and_update(scaler, optimizer)
    assert scaler.state_dict()["scale"] == 8.0


def test_a_get_scale_with_a_floor_is_saved() -> None:
    class Own(GradScaler):
        def get_scale(self) -> float:
            return max(super().get_scale(), 8.0)

    scaler = Own(DEVICE, init_scale=4.0)
    param, optimizer = one_parameter(torch.ones(2))
    for value in (1.0, math.nan, 1.0):
        optimizer.zero_grad()
        scaler.scale(param.sum() * value).backward()
        step_and_update(scaler, optimizer)
        made = GradScaler()
        made.load_state_dict(scaler.state_dict())
        assert made.get_scale() == scaler.get_scale() == 8.0
        copy.deepcopy(scaler)


def test_a_fused_step_refuses_gradients_of_two_scales() -> None:
    """They came before the scale moved, and after it."""
    often, rarely = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    one, other = (torch.optim.SGD([param], lr=0.1, fused=True) for param in (often, rarely))
    scaler = GradScaler(growth_interval=1)
    scaler._check_inf_per_device = MethodType(GradScaler._check_inf_per_device, scaler)  # type: ignore[method-assign]
    for optimizers in ((one, other), (one,), (one,)):
        scaler.scale((often + rarely).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    with pytest.raises(CallOrderError, match="one GradScaler for each cadence"):
        scaler.step(other)
