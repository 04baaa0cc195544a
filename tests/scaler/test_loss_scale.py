"""The scale: who moves it, what is written in place, and losses that are not finite."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device import DEVICE

from halfstep._gradients import scalars
from halfstep._gradients.scalars import LARGEST_SCALE, SMALLEST_SCALE
from halfstep._scaler import device_scale
from halfstep._scaler.device_scale import LAG, DeviceScale, Kernel, Number
from halfstep._scaler.engine import scale_on
from halfstep._scaler.loss_scale import LossScale, state_of
from halfstep._scaler.scale_state import LOWEST, Dynamic, ScaleState, Static, next_state

CPU = torch.device("cpu")


@contextmanager
def waiting_device() -> Iterator[None]:
    """Let the CPU do what is done on an accelerator."""
    before = set(scalars.READABLE)
    scalars.READABLE.clear()
    try:
        yield
    finally:
        scalars.READABLE.update(before)


def made(state: ScaleState) -> LossScale:
    return scale_on(CPU, LossScale(state))


def launch(scale: LossScale, found_inf: bool, loss: float = 1.0) -> None:
    """Make an update whose flag only the device knows."""
    scale.see_loss(torch.tensor(loss))
    scale.update([torch.tensor(float(found_inf))])


exponents = st.integers(-126, 127)
schedules = st.one_of(
    st.just(Dynamic()),
    st.just(Static()),
    st.builds(
        Dynamic,
        growth_factor=st.sampled_from([1.0, 2.0, 1.5, 1e30]) | st.floats(1.0, 1e6),
        backoff_factor=st.sampled_from([0.5, 0.5, 0.5, 1.0, 0.25]) | st.floats(1e-6, 1.0),
        growth_interval=st.integers(1, 6),
        trials=st.booleans(),
    ),
)
events = st.lists(
    st.tuples(
        st.booleans() | st.just(True),
        st.sampled_from([1.0] * 7 + [math.inf, math.nan]),
    ),
    min_size=20,
    max_size=60,
)


@st.composite
def first_states(draw: st.DrawFn) -> ScaleState:
    low, middle, high = sorted(draw(exponents) for _ in range(3))
    scale, schedule = draw(st.sampled_from([2.0**middle, 1.3 * 2.0**middle])), draw(schedules)
    with_limits = ScaleState.first(
        scale, schedule, min_scale=2.0**low, max_scale=1.5 * 2.0 ** max(high, middle)
    )
    return draw(
        st.sampled_from(
            [ScaleState.first(65536.0, schedule), ScaleState.first(scale, schedule), with_limits]
        )
    )


# --- the host knows -------------------------------------------------------------------------------


@settings(max_examples=60)
@given(first_states(), events, st.booleans())
def test_with_known_flags_the_state_moves_at_once(
    state: ScaleState, sequence: list[tuple[bool, float]], is_device: bool
) -> None:
    """Everything on the CPU, and plain steps on an accelerator."""
    with waiting_device() if is_device else contextmanager(lambda: iter([None]))():
        scale = made(state)
        for found_inf, loss in sequence:
            scale.see_loss(torch.tensor(loss))
            scale.update(found_inf)
            is_finite = math.isfinite(loss)
            state = next_state(state, found_inf=found_inf, loss_is_finite=is_finite)
            assert scale.read() == state == state_of(scale.snapshot())
            assert scale.tensor.item() == scale.value() == state.scale
            assert not scale.has_loss


# --- only the device knows ------------------------------------------------------------------------


@settings(max_examples=60)
@given(first_states(), st.lists(st.booleans(), min_size=10, max_size=40))
def test_the_host_knows_what_the_kernel_does(state: ScaleState, flags: list[bool]) -> None:
    tracker = torch.zeros((), dtype=torch.int32)
    kernel = Kernel.of(state, tracker.device)
    if kernel is None:
        return
    scale, number = torch.tensor(state.scale), Number(state.scale, 0)
    for found_inf in flags:
        kernel.move_(scale, tracker, torch.tensor(float(found_inf)))
        number = kernel.moved(number, found_inf)
        assert (scale.item(), tracker.item()) == number


def test_in_a_cuda_graph_the_scale_keeps_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay does what was captured, and the host does not follow."""
    monkeypatch.setattr(device_scale, "is_capturing", lambda _: True)
    with waiting_device():
        scale = made(ScaleState.first(2.0**16, Dynamic()))
        for _ in range(50):
            launch(scale, True)
        assert scale.value() == scale.read().scale == LOWEST
        assert scale.read().num_skipped == 0


@settings(max_examples=60)
@given(
    st.sampled_from([Dynamic(growth_interval=3, trials=False), Dynamic(1.5, 0.3, 2), Static()]),
    st.lists(st.sampled_from([False, False, True]), min_size=10, max_size=40),
)
def test_the_device_moves_the_scale_as_the_host_would(
    schedule: Dynamic | Static, flags: list[bool]
) -> None:
    """In the usual course, no lag is seen in the scale, nor in what is read."""
    state = ScaleState.first(2.0**100, schedule)
    with waiting_device():
        scale = made(state)
        in_a_row = 0
        for found_inf in flags:
            in_a_row = in_a_row + 1 if found_inf else 0
            if in_a_row == 8:
                return
            launch(scale, found_inf)
            state = next_state(state, found_inf=found_inf)
            assert scale.tensor.item() == scale.value() == state.scale
            assert scale.read() == state


def scales_and_end(
    state: ScaleState, sequence: list[tuple[bool, float]], looks: bool
) -> tuple[list[float], ScaleState]:
    """Return the scales, and the state once all is known."""
    scales = []
    scale = made(state)
    for found_inf, loss in sequence:
        scale.see_loss(torch.tensor(loss))
        scale.update([torch.tensor(float(found_inf))])
        if looks:
            scale.read()
            state_of(scale.snapshot())
        scales.append(scale.tensor.item())
    for _ in range(2 * LAG):  # the newest could be stale
        launch(scale, False)
    assert isinstance(scale, DeviceScale)
    scale.follow_device()
    return scales, scale.read()


@settings(max_examples=60)
@given(first_states(), events)
def test_whatever_happens_the_host_follows(
    state: ScaleState, sequence: list[tuple[bool, float]]
) -> None:
    with waiting_device():
        scales, end = scales_and_end(state, sequence, looks=False)
        assert (scales, end) == scales_and_end(state, sequence, looks=True)
    skipped = sum(found_inf for found_inf, _ in sequence)
    assert end.num_skipped == skipped
    assert end.num_taken == len(sequence) + 2 * LAG - skipped
    assert min(scales) >= state.min_scale
    assert (end.skipped_in_a_row, end.reached_floor) == (0, False)


def test_what_the_kernel_does_not_know_comes_two_updates_late() -> None:
    schedule = Dynamic(growth_interval=1, trials=False)
    with waiting_device():
        scale = made(ScaleState.first(32.0, schedule, max_scale=64.0))
        seen = []
        for _ in range(6):
            launch(scale, False)
            seen.append(scale.tensor.item())
        # The host knows that the scale has come to its limit, and corrects what the device did.
        assert seen == [64.0, 128.0, 256.0, 64.0, 64.0, 64.0]
        assert scale.read().num_taken == 6


def test_a_non_finite_loss_is_restored_late_too() -> None:
    with waiting_device():
        scale = made(ScaleState.first(64.0, Dynamic()))
        seen = []
        for found_inf, loss in [(True, math.nan)] * 2 + [(False, 1.0)] * 4:
            launch(scale, found_inf, loss)
            seen.append(scale.tensor.item())
    assert seen == [32.0, 16.0, 16.0, 16.0, 64.0, 64.0]


def test_known_and_unknown_flags_in_turn() -> None:
    """As with a plain and a fused optimizer that step in different iterations."""
    with waiting_device():
        scale, state = made(ScaleState.first(64.0, Dynamic(growth_interval=2))), None
        state = scale.read()
        for number in range(12):
            found_inf = number in (3, 8)
            if number % 3:
                launch(scale, found_inf)
            else:
                scale.update(found_inf)
            state = next_state(state, found_inf=found_inf)
            assert scale.read() == state
            assert scale.tensor.item() == state.scale


@pytest.mark.parametrize("new", [8.0, 64.0])
def test_setting_the_scale_outruns_what_is_under_way(new: float) -> None:
    with waiting_device():
        scale = made(ScaleState.first(64.0, Dynamic()))
        launch(scale, True)
        scale.set(new)
        assert scale.tensor.item() == new
        for _ in range(LAG + 1):
            launch(scale, True)
        state = scale.read()
    assert (state.scale, state.num_skipped) == (new / 2 ** (LAG + 1), 2 + LAG)


def test_loading_drops_what_is_under_way() -> None:
    state = ScaleState.first(4.0, Dynamic())
    with waiting_device():
        scale = made(ScaleState.first(64.0, Dynamic()))
        launch(scale, True)
        before = scale.snapshot()
        scale.load(state)
        assert scale.read() == state
        assert state_of(before).num_skipped == 1  # who had it can still read it
        for _ in range(LAG + 1):
            launch(scale, False)
        assert scale.read().num_taken == LAG + 1


# --- written in place -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_device", [False, True])
@pytest.mark.parametrize("num_overflows", [0, 2])
@pytest.mark.parametrize("value", [0.25, 2.0**20])
def test_a_scale_written_in_place_is_read_as_one_set_by_hand(
    value: float, num_overflows: int, is_device: bool
) -> None:
    with waiting_device() if is_device else contextmanager(lambda: iter([None]))():
        scale = made(ScaleState.first(2.0**16, Dynamic(), max_scale=2.0**16))
        for _ in range(num_overflows):
            scale.update(True)
        state = scale.read()
        scale.tensor.fill_(value)
        assert scale.can_amplify or value > 1.0 or not is_device
        assert scale.read() == state.with_scale(value)
        scale.update([torch.tensor(0.0)] if is_device else False)
        assert scale.read() == next_state(state.with_scale(value), found_inf=False)


def test_a_growth_tracker_written_in_place_counts() -> None:
    scale = made(ScaleState.first(4.0, Dynamic(growth_interval=5)))
    scale.growth_tracker.fill_(4)
    scale.update(False)
    assert scale.tensor == 8.0
    assert scale.growth_tracker == 0


def test_addresses_stay() -> None:
    state = ScaleState.first(4.0, Dynamic())
    scale = made(state)
    parts = [scale.tensor, scale.growth_tracker, scale.bad_loss]
    before = [part.data_ptr() for part in parts]
    scale.update(True)
    scale.set(8.0)
    scale.set(torch.tensor(0.5))
    scale.load(dataclasses.replace(state, scale=32.0, min_scale=2.0, growth_tracker=3))
    now = [scale.tensor, scale.growth_tracker, scale.bad_loss]
    assert [part.data_ptr() for part in now] == before
    assert [part.item() for part in now] == [32.0, 3, 0.0]
    assert [part.dtype for part in now] == [torch.float32, torch.int32, torch.float32]


@pytest.mark.parametrize("new", [0.0, -0.0, -3.0, math.nan, math.inf, -math.inf, 2.0**-127])
def test_an_unusable_tensor_changes_nothing(new: float) -> None:
    scale = made(ScaleState.first(65536.0, Dynamic()))
    for loss in (1.0, math.nan, 1.0):
        scale.see_loss(torch.tensor(loss))
        scale.update(math.isnan(loss))
    before = scale.read()
    assert before.is_trial
    scale.set(torch.tensor([[new]]))
    assert scale.read() == before


@pytest.mark.parametrize("new", [SMALLEST_SCALE, LARGEST_SCALE, 1.0])
def test_usable_tensors(new: float) -> None:
    scale = made(ScaleState.first(4.0, Dynamic(), max_scale=8.0))
    scale.set(torch.tensor(new, dtype=torch.float64))
    assert scale.tensor == new


@pytest.mark.parametrize("is_device", [False, True])
def test_a_lowered_interval(is_device: bool) -> None:
    """PyTorch's kernel tests for equality: a count beyond the interval would never match."""
    with waiting_device() if is_device else contextmanager(lambda: iter([None]))():
        scale = made(ScaleState.first(4.0, Dynamic(growth_interval=100)))
        found: bool | list[torch.Tensor] = [torch.tensor(0.0)] if is_device else False
        for _ in range(10):
            scale.update(found)
        scale.set_schedule(Dynamic(growth_interval=3))
        scale.update(found)
        assert scale.tensor == 8.0


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


with torch.device("cpu"):  # another device may not have every dtype
    LOSSES = list(losses())


@pytest.mark.parametrize(("loss", "is_finite"), LOSSES)
def test_losses(loss: torch.Tensor, is_finite: bool) -> None:
    loss = loss.to(DEVICE)
    scale = made(ScaleState.first(4.0, Dynamic()))
    for seen in (torch.tensor(1.0), loss, torch.tensor(1.0)):
        scale.see_loss(seen)
    assert not scale.bad_loss.requires_grad
    assert scale.loss_is_finite() == is_finite
    assert scale.loss_flag().item() == (not is_finite)
    scale.update(True)
    assert scale.tensor == 2.0
    assert scale.read().may_restore == (not is_finite)
    scale.update(False)
    assert scale.tensor == (2.0 if is_finite else 4.0)
    scale.update(True)  # forgotten
    assert scale.read().scale == (1.0 if is_finite else 2.0)


def test_setting_the_scale_forgets_a_bad_loss() -> None:
    state = ScaleState.first(4.0, Dynamic())
    for new in (8.0, torch.tensor(8.0), torch.tensor(0.0), state):
        scale = made(state)
        scale.see_loss(torch.tensor(math.nan))
        scale.load(new) if isinstance(new, ScaleState) else scale.set(new)
        assert scale.loss_is_finite()


# --- autograd -------------------------------------------------------------------------------------


def test_looking_at_losses_does_not_disturb_the_backward_pass() -> None:
    """Autograd keeps the scale of `loss * scale`, and refuses if it has been written to since."""
    scale = made(ScaleState.first(4.0, Dynamic()))
    loss = torch.tensor(1.0, requires_grad=True)
    scaled = loss * scale.tensor
    scale.see_loss(loss)
    scale.see_loss(loss)
    scaled.backward()
    assert loss.grad == 4.0


@pytest.mark.parametrize("is_device", [False, True])
def test_a_backward_pass_after_the_scale_has_changed_is_refused_as_in_torch(
    is_device: bool,
) -> None:
    state = ScaleState.first(4.0, Dynamic())
    with waiting_device() if is_device else contextmanager(lambda: iter([None]))():
        scale = made(state)
        for change in (
            lambda: scale.update(False),
            lambda: scale.update([torch.tensor(1.0)] if is_device else True),
            lambda: scale.set(8.0),
            lambda: scale.set(torch.tensor(8.0)),
            lambda: scale.load(state),
        ):
            scaled = torch.tensor(1.0, requires_grad=True) * scale.tensor
            change()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                scaled.backward()


def test_it_may_be_made_in_inference_mode() -> None:
    with torch.inference_mode():
        scale = made(ScaleState.first(4.0, Dynamic()))
        scale.see_loss(torch.tensor(1.0))
        scale.update(False)
    loss = torch.tensor(1.0, requires_grad=True)
    (loss * scale.tensor).backward()
    scale.see_loss(loss)
    scale.update(False)
    assert scale.read().num_taken == 2
