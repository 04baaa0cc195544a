"""The state on a device: the same transition bit for bit, in one buffer, without waiting."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep._scaler.rules import Dynamic, LogMax, Rule, Static
from halfstep._scaler.scalars import LARGEST_COUNT, LARGEST_SCALE, SMALLEST_SCALE
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.table import SLOT, Answers, Kind, next_sources
from halfstep._scaler.transition import DeviceSnapshot, DeviceState, next_state

CPU = torch.device(DEVICE)

dynamic = {
    "growth_factor": st.sampled_from([1.0, 2.0, 1.5, 1e30]) | st.floats(1.0, 1e6),
    "backoff_factor": st.sampled_from([0.5, 0.5, 0.5, 1.0, 0.25]) | st.floats(1e-6, 1.0),
    "growth_interval": st.integers(1, 6),
    "hysteresis": st.integers(1, 3),
    "refill": st.sampled_from(["growth", "step"]),
    "probe_after": st.none() | st.integers(1, 9),
}
rules = st.one_of(
    st.just(Dynamic()),
    st.just(Static()),
    st.builds(Dynamic, **dynamic),
    st.builds(
        LogMax,
        **dynamic,
        sigmas=st.sampled_from([0.0, 3.09]) | st.floats(0, 100),
        decay=st.sampled_from([0.0, 0.5, 0.99]) | st.floats(0, 0.999),
    ),
)
exponents = st.integers(-126, 127)
amaxes = st.tuples(st.floats(1.0, 2.0), st.integers(-30, 10) | exponents).map(
    lambda parts: parts[0] * 2.0 ** parts[1]
)


@st.composite
def first_states(draw: st.DrawFn) -> ScaleState:
    low, middle, high = sorted(draw(exponents) for _ in range(3))
    scale = draw(st.sampled_from([2.0**middle, 1.3 * 2.0**middle]))
    return draw(
        st.sampled_from(
            [
                ScaleState.first(65536.0, rule := draw(rules)),
                ScaleState.first(scale, rule),
                ScaleState.first(scale, rule, min_scale=2.0**low, max_scale=1.5 * 2.0**high),
            ]
        )
    )


@dataclasses.dataclass
class Event:
    """One iteration, and what the user does after it."""

    found_inf: bool
    loss: float
    outlier: bool | None
    amax: float | None
    then: str


events = st.builds(
    Event,
    found_inf=st.booleans() | st.just(True),
    loss=st.sampled_from([1.0] * 7 + [math.inf, -math.inf, math.nan]),
    outlier=st.sampled_from([None, None, False, True]),
    amax=st.sampled_from([None, 0.0, 1e-45, math.inf, math.nan]) | amaxes,
    then=st.sampled_from([""] * 12 + ["number", "tensor", "bad tensor", "load", "write", "rule"]),
)


def scalar(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor(float(value))


def update(on_device: DeviceState, state: ScaleState, event: Event) -> ScaleState:
    """Go on by one iteration on both sides."""
    on_device.see_loss_(torch.tensor(event.loss, device=on_device.device))
    found_inf, outlier, amax = (
        value if value is None else value.to(on_device.device)
        for value in map(scalar, (event.found_inf, event.outlier, event.amax))
    )
    assert found_inf is not None
    on_device.update_(found_inf, state, outlier=outlier, amax=amax)
    return next_state(
        state,
        found_inf=event.found_inf,
        loss_is_finite=math.isfinite(event.loss),
        outlier=bool(event.outlier),
        amax=event.amax,
    )


@settings(max_examples=70)
@given(first_states(), st.lists(events, min_size=60, max_size=90), st.data())
def test_the_device_does_the_same_bit_for_bit(
    state: ScaleState, sequence: list[Event], data: st.DataObject
) -> None:
    on_device = DeviceState(state, CPU)
    for event in sequence:
        state = update(on_device, state, event)
        assert on_device.read(state) == state
        assert not on_device.bad_loss
        match event.then:
            case "number":
                state = state.with_scale(2.0 ** data.draw(exponents))
                on_device.fill_(state.scale)
            case "tensor":
                state = state.with_scale(1.7 * 2.0 ** data.draw(exponents))
                on_device.copy_(torch.tensor(state.scale, dtype=torch.float64))
            case "bad tensor":
                bad = st.sampled_from([0.0, -1.0, math.inf, math.nan, 2.0**-127])
                on_device.copy_(torch.tensor([data.draw(bad)]))
            case "load":  # a checkpoint into a new scaler
                state = ScaleState.from_dict(json.loads(json.dumps(state.to_dict())))
                on_device = DeviceState(state, CPU)
            case "write":  # the same into this one
                on_device.write_(ScaleState.first(4.0, state.rule))
                on_device.write_(state)
            case "rule":
                state = dataclasses.replace(state, rule=data.draw(rules))
                on_device.set_rule_(state.rule)
                state = on_device.read(state)
        assert on_device.read(state) == state


def test_the_table_has_an_answer_for_everything() -> None:
    """Each column takes its value from a slot that exists, whatever the answers."""
    for number in range(2 ** len(Answers._fields)):
        answers = Answers(*(bool(number >> k & 1) for k in range(len(Answers._fields))))
        for flags in itertools.product((False, True), repeat=3):
            for refill in ("growth", "step"):
                sources = next_sources(answers, Kind(refill, *flags))
                assert {*sources, *sources.values()} <= set(SLOT)


# --- small things ---------------------------------------------------------------------------------


def test_a_count_past_the_interval() -> None:
    """update_scale_ tests for equality; A29 in the facts."""
    state = dataclasses.replace(ScaleState.first(4.0, Dynamic(growth_interval=3)), growth_tracker=7)
    on_device = DeviceState(state, CPU)
    assert on_device.growth_tracker == 2
    on_device.update_(torch.tensor(0.0), state)
    assert on_device.read(state) == next_state(state, found_inf=False)


@pytest.mark.parametrize(
    "follow",
    [
        lambda on_device, rule: None,  # update_ notices it
        lambda on_device, rule: on_device.set_rule_(rule),
    ],
)
def test_a_lowered_interval(follow: Callable[[DeviceState, Rule], None]) -> None:
    state = ScaleState.first(4.0, Dynamic(growth_interval=100))
    on_device = DeviceState(state, CPU)
    for _ in range(10):
        on_device.update_(torch.tensor(0.0), state)
    state = dataclasses.replace(state, rule=Dynamic(growth_interval=3))
    follow(on_device, state.rule)
    on_device.update_(torch.tensor(0.0), state)
    assert on_device.scale == 8.0


def test_a_scale_that_is_restored_does_not_grow() -> None:
    """Not even at the end of an interval: hysteresis is refilled by growth alone."""
    state = ScaleState.first(4.0, Dynamic(growth_interval=1, hysteresis=2))
    on_device = DeviceState(state, CPU)
    for found_inf, loss in [(True, math.nan), (True, math.nan), (False, 1.0)]:
        state = update(on_device, state, Event(found_inf, loss, None, None, ""))
        assert on_device.read(state) == state
    assert (state.scale, state.resume_scale, state.hysteresis_left) == (4.0, 2.0, 1)


@pytest.mark.parametrize("value", [LARGEST_COUNT, 0x7F800001, 0x7FC00000, 0x7F800000, 1])
def test_counts_whose_bits_are_nan_or_inf_survive(value: int) -> None:
    """Nothing but copies of bits may happen to them."""
    state = dataclasses.replace(ScaleState.first(4.0, Dynamic()), num_skipped=value)
    on_device = DeviceState(state, CPU)
    on_device.update_(torch.tensor(0.0), state)
    assert on_device.read(state).num_skipped == value
    on_device.write_(state)
    on_device.update_(torch.tensor(0.0), state)
    assert on_device.snapshot().read(state).num_skipped == value


def test_small_counts_survive_where_subnormal_numbers_do_not() -> None:
    """Read as float32, a count is a subnormal number."""
    state = ScaleState.first(65536.0, Dynamic(growth_interval=3, hysteresis=2, probe_after=3))
    assert torch.set_flush_denormal(True)
    try:
        on_device = DeviceState(state, CPU)
        for found_inf in (0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1):
            state = update(on_device, state, Event(bool(found_inf), 1.0, None, None, ""))
            assert on_device.snapshot().read(state) == state
    finally:
        torch.set_flush_denormal(False)


def test_the_largest_counts_are_read() -> None:
    state = dataclasses.replace(
        ScaleState.first(4.0, Dynamic(growth_interval=LARGEST_COUNT, hysteresis=LARGEST_COUNT)),
        growth_tracker=LARGEST_COUNT - 1,
        overflows=LARGEST_COUNT,
    )
    assert DeviceState(state, CPU).read(state) == state


@pytest.mark.parametrize("new", [0.0, -0.0, -3.0, math.nan, math.inf, -math.inf, 2.0**-127])
def test_an_unusable_tensor_changes_nothing(new: float) -> None:
    state = ScaleState.first(65536.0, Dynamic(probe_after=3))
    on_device = DeviceState(state, CPU)
    for found_inf in (0.0, 1.0, 1.0, 1.0):
        on_device.update_(torch.tensor(found_inf), state)
    before = on_device.read(state)
    assert before.resume_scale
    on_device.copy_(torch.tensor([[new]]))
    assert on_device.read(state) == before


@pytest.mark.parametrize("new", [SMALLEST_SCALE, LARGEST_SCALE, 1.0])
def test_usable_tensors(new: float) -> None:
    on_device = DeviceState(ScaleState.first(4.0, Dynamic(), max_scale=8.0), CPU)
    on_device.copy_(torch.tensor(new, dtype=torch.float64))
    assert on_device.scale == new


@pytest.mark.parametrize("num_overflows", [0, 2])
@pytest.mark.parametrize("scale", [0.25, 2.0**20])
def test_a_scale_written_in_place_is_read_as_one_set_by_hand(
    scale: float, num_overflows: int
) -> None:
    state = ScaleState.first(2.0**16, Dynamic(), max_scale=2.0**16)
    for _ in range(num_overflows):
        state = next_state(state, found_inf=True)
    on_device = DeviceState(state, torch.device(DEVICE))
    on_device.scale.fill_(scale)
    assert on_device.read(state) == state.with_scale(scale)


def test_setting_the_scale_ends_the_iteration_of_a_bad_loss() -> None:
    state = ScaleState.first(4.0, Dynamic())
    for set_scale in (
        lambda on_device: on_device.fill_(8.0),
        lambda on_device: on_device.copy_(torch.tensor(8.0)),
        lambda on_device: on_device.copy_(torch.tensor(0.0)),
        lambda on_device: on_device.write_(state),
    ):
        on_device = DeviceState(state, CPU)
        on_device.see_loss_(torch.tensor(math.nan))
        set_scale(on_device)
        assert on_device.bad_loss == 0


def test_another_rule() -> None:
    state = ScaleState.first(65536.0, Dynamic())
    on_device = DeviceState(state, CPU)
    for rule in (
        Dynamic(hysteresis=3, refill="step", probe_after=2),
        Static(),
        LogMax(growth_interval=1, decay=0.5, probe_after=2),
        Dynamic(probe_after=None),  # takes over a scale that is held
    ):
        state = dataclasses.replace(state, rule=rule)  # update_ notices it
        for found_inf in (1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1):
            state = update(on_device, state, Event(bool(found_inf), 1.0, None, 3.0, ""))
            assert on_device.read(state) == state


# --- losses ---------------------------------------------------------------------------------------


def losses() -> Iterator[tuple[torch.Tensor, bool]]:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        largest = torch.finfo(dtype).max
        yield torch.tensor(largest, dtype=dtype), True
        yield torch.full((3, 4), largest, dtype=dtype), True  # their sum would be inf
        yield torch.tensor(-largest, dtype=dtype).requires_grad_(), True
        yield torch.empty(0, dtype=dtype), True
        for bad in (math.inf, -math.inf, math.nan):
            yield torch.tensor(bad, dtype=dtype), False
            yield torch.tensor([[1.0, bad], [2.0, 3.0]], dtype=dtype).requires_grad_().t(), False
        yield torch.tensor([math.inf, -math.inf], dtype=dtype), False
    for complex_dtype in (torch.complex64, torch.complex128):
        yield torch.tensor(1 + 2j, dtype=complex_dtype), True
        yield torch.tensor(complex(1, math.inf), dtype=complex_dtype).conj(), False
        yield torch.tensor([complex(math.nan, 1), 2], dtype=complex_dtype), False
    yield torch.tensor(3), True
    yield torch.tensor([True, False]), True


@pytest.mark.parametrize(("loss", "is_finite"), list(losses()))
def test_losses(loss: torch.Tensor, is_finite: bool) -> None:
    state = ScaleState.first(4.0, Dynamic())
    on_device = DeviceState(state, CPU)
    for seen in (torch.tensor(1.0), loss, torch.tensor(1.0)):
        on_device.see_loss_(seen)
    assert not on_device.buffer.requires_grad
    assert on_device.bad_loss.isfinite() == is_finite
    on_device.update_(torch.tensor(1.0), state)
    assert on_device.scale == 2.0
    assert on_device.read(state).may_restore == (not is_finite)
    on_device.update_(torch.tensor(0.0), state)
    assert on_device.scale == (2.0 if is_finite else 4.0)
    on_device.update_(torch.tensor(1.0), state)  # forgotten
    assert on_device.read(state).scale == (1.0 if is_finite else 2.0)


# --- autograd -------------------------------------------------------------------------------------


def test_looking_at_losses_does_not_disturb_the_backward_pass() -> None:
    """Autograd keeps the scale of `loss * scale`, and refuses if it has been written to since."""
    on_device = DeviceState(ScaleState.first(4.0, Dynamic()), CPU)
    loss = torch.tensor(1.0, requires_grad=True)
    scaled = loss * on_device.scale
    on_device.see_loss_(loss)
    on_device.see_loss_(loss)
    scaled.backward()
    assert loss.grad == 4.0


def test_a_backward_pass_after_the_scale_has_changed_is_refused_as_in_torch() -> None:
    state = ScaleState.first(4.0, Dynamic())
    on_device = DeviceState(state, CPU)
    for change in (
        lambda: on_device.update_(torch.tensor(1.0), state),
        lambda: on_device.fill_(8.0),
        lambda: on_device.copy_(torch.tensor(8.0)),
        lambda: on_device.write_(state),
    ):
        scaled = torch.tensor(1.0, requires_grad=True) * on_device.scale
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            scaled.backward()


def test_it_may_be_made_in_inference_mode() -> None:
    state = ScaleState.first(4.0, Dynamic())
    with torch.inference_mode():
        on_device = DeviceState(state, CPU)
        on_device.see_loss_(torch.tensor(1.0))
        on_device.update_(torch.tensor(0.0), state)
    loss = torch.tensor(1.0, requires_grad=True)
    (loss * on_device.scale).backward()
    on_device.see_loss_(loss)
    on_device.update_(torch.tensor(0.0), state)
    assert on_device.read(state).num_taken == 2


# --- one buffer -----------------------------------------------------------------------------------


def test_addresses_stay() -> None:
    state = ScaleState.first(4.0, Dynamic())
    on_device = DeviceState(state, CPU)
    parts = [on_device.buffer, on_device.scale, on_device.growth_tracker, on_device.bad_loss]
    on_device.update_(torch.tensor(1.0), state)
    on_device.fill_(8.0)
    on_device.copy_(torch.tensor(0.5))
    on_device.write_(dataclasses.replace(state, scale=32.0, min_scale=2.0, growth_tracker=3))
    now = [on_device.buffer, on_device.scale, on_device.growth_tracker, on_device.bad_loss]
    assert [part.data_ptr() for part in parts] == [part.data_ptr() for part in now]
    assert [part.item() for part in parts[1:]] == [32.0, 3, 0.0]
    assert [part.dtype for part in parts[1:]] == [torch.float32, torch.int32, torch.float32]


def test_a_snapshot_stays_as_it_was() -> None:
    state = ScaleState.first(4.0, Dynamic())
    on_device = DeviceState(state, CPU)
    on_device.see_loss_(torch.tensor(math.inf))
    snapshots = [on_device.snapshot()]
    expected = [(state, False)]
    for found_inf in (False, True, True):
        state = update(on_device, state, Event(found_inf, math.inf, None, None, ""))
        snapshots.append(on_device.snapshot())
        expected.append((state, True))
    assert [snapshot.read(state) for snapshot in snapshots] == [before for before, _ in expected]
    assert [snapshot.read_with_loss(state) for snapshot in snapshots] == expected


def test_a_copy_of_the_buffer_is_a_snapshot() -> None:
    state = ScaleState.first(4.0, Dynamic())
    on_device = DeviceState(state, CPU)
    assert DeviceSnapshot(on_device.buffer.clone()).read(state) == state


# --- no waiting, few ops --------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Lists the ops that run, and refuses those that wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        assert "_local_scalar_dense" not in name
        self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rule", "kwargs", "num_ops"),
    [
        (Dynamic(), {}, 13),
        (Dynamic(hysteresis=2, refill="step", probe_after=None), {}, 13),
        (Dynamic(), {"outlier": torch.tensor(1.0)}, 14),
        (Static(), {}, 13),
        (LogMax(), {"amax": torch.tensor(1.0)}, 47),
    ],
)
def test_an_update_does_not_wait_and_takes_few_ops(
    rule: Rule, kwargs: dict[str, torch.Tensor], num_ops: int
) -> None:
    state = ScaleState.first(65536.0, rule)
    on_device = DeviceState(state, CPU)
    found_inf = torch.tensor(1.0)
    with Ops() as ops:
        on_device.update_(found_inf, state, **kwargs)
    assert len(ops.names) == num_ops


def test_nothing_but_reading_waits() -> None:
    state = ScaleState.first(65536.0, LogMax(), max_scale=2.0**20)
    with Ops():
        on_device = DeviceState(state, CPU)
        on_device.see_loss_(torch.ones(2))
        on_device.update_(torch.tensor(1.0), state, torch.tensor(0.0), torch.tensor(1.0))
        on_device.fill_(2.0)
        on_device.copy_(torch.tensor(3.0))
        on_device.write_(state)
        on_device.set_rule_(Dynamic())
        on_device.snapshot()


# --- torch.compile --------------------------------------------------------------------------------


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("rule", [Dynamic(growth_interval=2, probe_after=2), LogMax()])
def test_an_iteration_is_one_graph(rule: Rule) -> None:
    state = ScaleState.first(65536.0, rule)
    on_device = DeviceState(state, CPU)

    def iterate(loss: torch.Tensor, found: torch.Tensor, state: ScaleState) -> torch.Tensor:
        scaled = loss * on_device.scale
        on_device.see_loss_(loss)
        on_device.update_(found, state, amax=found + 0.5)
        return scaled

    with fresh_compiler():
        compiled = torch.compile(iterate, backend="aot_eager", fullgraph=True)
        for found_inf, value in [(0, 1.0), (0, 1.0), (1, 1.0), (1, 1.0), (1, math.inf), (0, 2.0)]:
            loss = torch.tensor(value, requires_grad=True)
            compiled(loss, torch.tensor(float(found_inf)), state).backward()
            assert loss.grad == state.scale
            state = next_state(
                state,
                found_inf=bool(found_inf),
                loss_is_finite=math.isfinite(value),
                amax=found_inf + 0.5,
            )
            assert on_device.read(state) == state


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor_keeps_the_scale_and_sees_a_bad_loss() -> None:
    """It drops a clone() of the scale, and takes loss * 0 for 0."""
    on_device = DeviceState(ScaleState.first(4.0, Dynamic()), CPU)

    def iterate(loss: torch.Tensor) -> torch.Tensor:
        scaled = loss * on_device.scale
        on_device.see_loss_(loss)
        on_device.buffer[SLOT["scale"]].mul_(2.0)
        return scaled

    with fresh_compiler():
        loss = torch.tensor(math.inf, requires_grad=True)
        torch.compile(iterate, fullgraph=True)(loss).backward()
    assert loss.grad == 4.0
    assert on_device.scale == 8.0
    assert on_device.bad_loss.isnan()


# --- CUDA -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [Dynamic(growth_interval=3, probe_after=3), LogMax(decay=0.5)])
def test_cuda_does_the_same_bit_for_bit_and_does_not_wait(rule: Rule) -> None:
    generator = torch.Generator().manual_seed(0)
    state = ScaleState.first(65536.0, rule)
    on_device = DeviceState(state, torch.device("cuda"))
    for _ in range(200):
        chance, loss, amax = torch.rand(3, generator=generator).tolist()
        event = Event(chance < 0.5, math.inf if loss < 0.1 else 1.0, loss > 0.9, amax, "")
        try:
            torch.cuda.set_sync_debug_mode("error")
            state = update(on_device, state, event)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert on_device.read(state) == state
