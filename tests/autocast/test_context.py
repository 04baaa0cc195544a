import asyncio
import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.autocast.versions import VERSION
from tests.device import DEVICE
from tests.training import assert_same
from torch import Tensor, nn

from halfstep._autocast import Policy, Rule, autocast, preset, scopes
from halfstep._autocast.context import default_device
from halfstep._autocast.region import current_policy
from halfstep._pytorch import amp
from halfstep.errors import CallOrderError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KEEP_SOFTMAX_LOW = preset("standard") | Rule("softmax", "lower")


def linear() -> torch.dtype:
    """Return the dtype that a product of float32 tensors comes out in."""
    return F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype


def softmax() -> torch.dtype:
    return F.softmax(torch.ones(2, dtype=BF16), 0).dtype


def test_a_block_runs_in_lower_precision_and_the_rest_does_not() -> None:
    assert linear() == FP32
    with autocast(DEVICE, BF16):
        assert linear() == BF16
        assert torch.is_autocast_enabled(DEVICE)
        assert torch.get_autocast_dtype(DEVICE) == BF16
    assert linear() == FP32
    assert softmax() == BF16


def test_contexts_nest_and_restore() -> None:
    with autocast(DEVICE, BF16):
        with autocast(DEVICE, FP16, policy=KEEP_SOFTMAX_LOW):
            assert (linear(), softmax()) == (FP16, FP16)
            with autocast(DEVICE, enabled=False):
                assert (linear(), softmax()) == (FP32, BF16)
                with autocast(DEVICE):
                    assert softmax() == FP16  # dtype and policy of the context outside
            assert (linear(), softmax()) == (FP16, FP16)
        assert (linear(), softmax()) == (BF16, FP32)
    assert (linear(), softmax()) == (FP32, BF16)


def test_everything_is_restored_after_an_exception() -> None:
    before = amp.autocast_switches(DEVICE)
    outer = autocast(DEVICE, FP16, cache_enabled=False)
    with pytest.raises(KeyError), outer, autocast(DEVICE, BF16, policy=KEEP_SOFTMAX_LOW):
        raise KeyError
    assert amp.autocast_switches(DEVICE) == before
    assert current_policy(DEVICE) is None
    with torch.autocast(DEVICE, BF16):
        assert softmax() == BF16


def test_a_plain_autocast_inside_keeps_the_policy() -> None:
    with autocast(DEVICE, BF16, policy=KEEP_SOFTMAX_LOW):
        with torch.autocast(DEVICE, dtype=FP16):
            assert (linear(), softmax()) == (FP16, FP16)
        with torch.autocast(DEVICE, enabled=False):
            assert linear() == FP32
        assert (linear(), softmax()) == (BF16, BF16)


def test_as_a_decorator() -> None:
    @autocast(DEVICE, BF16, policy=KEEP_SOFTMAX_LOW)
    def dtypes(offset: int, *, name: str) -> tuple[torch.dtype, torch.dtype, int, str]:
        """Say the dtypes."""
        return linear(), softmax(), offset, name

    assert dtypes.__doc__ == "Say the dtypes."
    assert dtypes(1, name="a") == (BF16, BF16, 1, "a")
    assert linear() == FP32


def test_a_decorated_method_may_call_itself() -> None:
    class Model(nn.Module):
        @autocast(DEVICE, BF16)
        def forward(self, depth: int) -> torch.dtype:
            return linear() if depth == 0 else self(depth - 1)

    assert Model()(3) == BF16
    assert linear() == FP32


def test_state_is_per_thread() -> None:
    seen: dict[str, object] = {}

    def work() -> None:
        seen["dtype"], seen["policy"] = linear(), current_policy(DEVICE)
        with autocast(DEVICE, FP16):
            entered.set()
            main_checked.wait()
            seen["inside"] = linear()

    entered, main_checked = threading.Event(), threading.Event()
    with autocast(DEVICE, BF16):
        thread = threading.Thread(target=work)
        thread.start()
        entered.wait()
        assert linear() == BF16
        main_checked.set()
        thread.join()
    assert seen == {"dtype": FP32, "policy": None, "inside": FP16}


def test_replicas_in_threads_get_the_gradients_of_one_replica() -> None:
    """As nn.DataParallel: autocast in the forward of each replica, one backward for all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 1))
    x = torch.randn(4, 8)

    def loss(chunk: Tensor) -> Tensor:
        with autocast(DEVICE, BF16):
            out: Tensor = model(chunk)
            return out.float().sum()

    (loss(x[:2]) + loss(x[2:])).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    losses: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda c=chunk: losses.append(loss(c))) for chunk in x.split(2)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    sum(losses, torch.zeros(())).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_the_device_is_inferred() -> None:
    assert default_device() == ("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.accelerator.is_available():
        with autocast(dtype=FP16):
            assert linear() == FP16


def test_the_dtype_defaults_to_pytorchs() -> None:
    with autocast(DEVICE):
        assert linear() == torch.get_autocast_dtype(DEVICE) == BF16


def test_float32_lowers_nothing() -> None:
    with autocast(DEVICE, FP32):
        assert linear() == FP32
        assert F.linear(torch.ones(2, 2, dtype=BF16), torch.ones(2, 2, dtype=BF16)).dtype == FP32


def test_pytorchs_cache_is_off_inside_and_on_again_outside() -> None:
    """PyTorch's switch is always off; ours is inherited by contexts inside."""
    assert torch.is_autocast_cache_enabled()
    for keeps in (False, True):
        with autocast(DEVICE, cache_enabled=keeps) as context:
            assert context._cache_enabled is keeps
            assert not torch.is_autocast_cache_enabled()
            with autocast(DEVICE, enabled=False), autocast(DEVICE) as inner:
                assert inner._cache_enabled is keeps
                assert not torch.is_autocast_cache_enabled()
            with torch.autocast(DEVICE):
                assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()


def test_the_cache_switch_of_outside_comes_back() -> None:
    torch.set_autocast_cache_enabled(False)
    with autocast(DEVICE, cache_enabled=True), autocast(DEVICE) as inner:
        assert inner._cache_enabled
    assert not torch.is_autocast_cache_enabled()
    with autocast(DEVICE) as context:
        assert not context._cache_enabled
    torch.set_autocast_cache_enabled(True)


def test_pytorchs_cache_ends_with_the_outermost_context() -> None:
    """PyTorch's kernels use it in a plain torch.autocast for another device, for one."""
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    with autocast("cuda", enabled=False), torch.autocast(DEVICE, BF16):
        F.linear(x, weight)
    with torch.no_grad():
        weight.add_(1)
    with torch.autocast(DEVICE, BF16):
        assert F.linear(x, weight).tolist() == [[4, 4]]


@pytest.fixture
def other_device(monkeypatch: pytest.MonkeyPatch, forgotten_policies: None) -> None:
    """A second device on every machine: a registered backend that does not tell."""
    monkeypatch.setattr(torch, "privateuseone", SimpleNamespace(), raising=False)


@pytest.mark.usefixtures("other_device")
def test_each_device_has_its_own_policy() -> None:
    with autocast(DEVICE, BF16, policy=KEEP_SOFTMAX_LOW), autocast("privateuseone", BF16):
        assert current_policy(DEVICE) == KEEP_SOFTMAX_LOW
        assert current_policy("privateuseone") == preset("standard")
        assert softmax() == BF16


def test_a_disabled_context_registers_and_activates_nothing() -> None:
    with autocast(DEVICE, enabled=False):
        assert current_policy(DEVICE) is None


def test_the_policy_in_force_can_be_asked_for() -> None:
    assert current_policy(DEVICE) is None
    with autocast(DEVICE):
        assert current_policy(DEVICE) == preset("standard")
        assert current_policy("cuda") is None
        with autocast(DEVICE, policy=KEEP_SOFTMAX_LOW):
            assert current_policy(DEVICE) == KEEP_SOFTMAX_LOW
        with autocast(DEVICE, policy="torch"):
            assert current_policy(DEVICE) == preset("torch")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device_type": torch.device(DEVICE)}, TypeError, r"device type.*pass device\.type"),
        ({"device_type": 0}, TypeError, r"takes a device type such as 'cuda' or 'cpu', got 0"),
        (
            {"device_type": "cup"},
            ValueError,
            r"no autocast for 'cup'; of the .* here, it has for cpu",
        ),
        (
            {"device_type": "meta"},
            ValueError,
            r"no autocast for 'meta'; of the .* here, it has for cpu",
        ),
        (
            {"device_type": "xla"},
            ValueError,
            r"no autocast for 'xla'; of the .* here, it has for cpu",
        ),
        ({"device_type": "cudaa"}, ValueError, r"no autocast for 'cudaa'; .* mean 'cuda'\?"),
        ({"device_type": ""}, ValueError, r"no autocast for ''; of the .* here, it has for cpu"),
        ({"device_type": "ipu", "enabled": False}, ValueError, r"no autocast for 'ipu'"),
        ({"dtype": torch.int8}, ValueError, r"float16 or torch\.bfloat16, got dtype=torch\.int8"),
        ({"dtype": torch.float64}, ValueError, r"autocast\(enabled=False\)"),
        ({"dtype": "bfloat16", "enabled": False}, ValueError, r"got dtype='bfloat16'"),
        ({"dtype": "torch.float16"}, ValueError, r"write dtype=torch\.float16"),
        ({"enabled": "no"}, TypeError, r"enabled is True or False, got 'no'"),
        ({"cache_enabled": "no"}, TypeError, r"cache_enabled is True or False"),
        ({"policy": "fast"}, ValueError, r"must start with a preset .*; got 'fast'"),
        ({"policy": ["softmax"]}, TypeError, r"a Policy or its text"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        autocast(**arguments)  # type: ignore[arg-type]
    assert linear() == FP32


@pytest.mark.parametrize("device", ["mtia", "xla", "maia"])
def test_off_is_possible_for_devices_whose_kernels_are_out_of_reach(device: str) -> None:
    torch.set_autocast_enabled(device, True)
    try:
        with autocast(device, enabled=False), autocast(DEVICE):
            assert not torch.is_autocast_enabled(device)
            assert linear() == BF16
        assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, False)
    with pytest.raises(
        ValueError, match=f"no autocast for '{device}'; of the .* here, it has for cpu"
    ):
        autocast(device)


@pytest.mark.usefixtures("forgotten_policies")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "xpu", "mps:0", "hpu", "privateuseone"])
def test_a_device_that_is_not_there_is_an_error_not_a_warning(device, monkeypatch):
    kind = device.partition(":")[0]
    if hasattr(torch, kind):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"no {kind.upper()} device here; leave device_type out"):
        autocast(device, FP16)
    with autocast(device, enabled=False):
        assert linear() == FP32


@pytest.mark.usefixtures("forgotten_policies")
@pytest.mark.parametrize("device", ["xpu", "mps:0"])
def test_a_device_that_is_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = device.partition(":")[0]
    monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: True)
    with autocast(device, FP16):
        assert torch.is_autocast_enabled(kind)
        assert linear() == FP32


def test_only_functions_can_be_decorated() -> None:
    with pytest.raises(TypeError, match=r"to run a block: with autocast"):
        autocast(DEVICE)(torch.ones(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [None, "torch", KEEP_SOFTMAX_LOW])
def test_a_pickled_context_is_the_same_context(policy: Policy | str | None) -> None:
    for copied in (
        pickle.loads(pickle.dumps(autocast(DEVICE, FP16, policy=policy))),
        copy.deepcopy(autocast(DEVICE, FP16, policy=policy)),
    ):
        with copied:
            assert linear() == FP16
            inside = current_policy(DEVICE)
        with autocast(DEVICE, FP16, policy=policy):
            assert inside == current_policy(DEVICE)
        with autocast(DEVICE, policy="torch-cuda"), copied:  # one without a policy inherits
            assert current_policy(DEVICE) == (inside if policy else preset("torch-cuda"))


def test_an_index_of_the_device_does_not_matter() -> None:
    with autocast("cpu:0", FP16):
        assert linear() == FP16


def test_any_dtype_will_do_where_autocast_is_off() -> None:
    with autocast(DEVICE, torch.float64, enabled=False):
        assert linear() == FP32
        with autocast(DEVICE):
            assert linear() == BF16


@pytest.mark.parametrize("autocast", [torch.autocast, autocast])
def test_what_code_reads_of_a_context(autocast: Any) -> None:
    with autocast(DEVICE, dtype=FP16, cache_enabled=False):
        context = autocast(DEVICE, dtype=BF16, cache_enabled=True)
        assert not hasattr(context, "prev")
        with context as entered:
            assert entered is context
            assert (context.device, context.fast_dtype) == ("cpu", BF16)
            assert (context._enabled, context._cache_enabled) == (True, True)
            outside = context.prev, context.prev_fastdtype, context.prev_cache_enabled
            assert outside == (True, FP16, False)
    assert autocast(DEVICE, enabled=False)._enabled is False


@pytest.mark.parametrize("name", ["fast_dtype", "device", "_enabled", "_cache_enabled", "prev"])
def test_a_write_to_a_context_says_what_to_do(name: str) -> None:
    context = autocast(DEVICE, BF16)
    with pytest.raises(AttributeError, match=r"make another one, autocast\(device_type, dtype"):
        setattr(context, name, False)
    with context:
        assert linear() == BF16


# --- out of order ---------------------------------------------------------------------------------

OUTSIDE = [amp.autocast_switches(device) for device in ("cpu", "ipu")]


def assert_nothing_is_left() -> None:
    assert [amp.autocast_switches(device) for device in ("cpu", "ipu")] == OUTSIDE
    assert scopes.current().outer is None
    assert scopes.nesting_depth() == 0


def test_the_mark_for_compiled_code_goes_with_the_last_context() -> None:
    torch.set_autocast_dtype("ipu", FP32)
    with autocast(DEVICE, BF16):
        with autocast(DEVICE, BF16, policy=KEEP_SOFTMAX_LOW):
            assert torch.is_autocast_enabled("ipu")
        assert torch.is_autocast_enabled("ipu")
    assert (torch.get_autocast_dtype("ipu"), torch.is_autocast_enabled("ipu")) == (FP32, False)
    torch.set_autocast_dtype("ipu", FP16)
    assert_nothing_is_left()


def test_leaving_in_a_thread_that_did_not_enter_is_an_error() -> None:
    context = autocast(DEVICE, BF16)
    with pytest.raises(CallOrderError, match=r"left in a thread that did not enter it"):
        context.__exit__(None, None, None)
    with autocast(DEVICE, FP16):
        with pytest.raises(CallOrderError, match=r"left in a thread that did not enter it"):
            context.__exit__(None, None, None)
        assert linear() == FP16
    assert_nothing_is_left()


@pytest.mark.parametrize(
    "inner",
    [
        autocast(DEVICE, FP16),
        autocast(DEVICE, BF16, policy=KEEP_SOFTMAX_LOW),
        autocast(DEVICE, enabled=False),
        "privateuseone",
    ],
    ids=repr,
)
@pytest.mark.usefixtures("other_device")
def test_a_context_left_before_one_inside_it_is_an_error(inner: autocast | str) -> None:
    def state() -> tuple[object, ...]:
        return amp.autocast_switches(DEVICE), *map(current_policy, (DEVICE, "privateuseone"))

    if isinstance(inner, str):
        inner = autocast(inner, BF16)
    with inner:
        alone = state()
    outer = autocast(DEVICE, BF16)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(CallOrderError) as caught:
        outer.__exit__(None, None, None)
    assert str(caught.value).startswith(f"{outer!r} is left while {inner!r}, entered after it, is")
    assert "asyncio.to_thread" in str(caught.value)
    # The inner one goes on as if there had been no other.
    assert state() == alone
    inner.__exit__(None, None, None)
    assert_nothing_is_left()


def test_contexts_that_do_the_same_may_take_turns() -> None:
    """Nobody sees a difference, and in the end they are all left."""

    async def task(num_turns: int) -> set[torch.dtype]:
        seen = set()
        with autocast(DEVICE, BF16):
            for _ in range(num_turns):
                seen.add(linear())
                await asyncio.sleep(0)
        return seen

    async def tasks() -> list[set[torch.dtype]]:
        return await asyncio.gather(task(1), task(3), task(2), task(2))

    assert asyncio.run(tasks()) == [{BF16}] * 4
    assert_nothing_is_left()


def test_a_generator_that_waits_inside_its_context_is_told_of() -> None:
    def generator() -> Iterator[torch.dtype]:
        with autocast(DEVICE, FP16):
            yield linear()

    waiting = generator()
    told = pytest.raises(CallOrderError, match="generators that wait inside their contexts")
    with told, autocast(DEVICE, BF16):
        next(waiting)
    waiting.close()
    assert_nothing_is_left()


def test_an_error_that_is_on_its_way_is_not_hidden() -> None:
    outer, inner = autocast(DEVICE, BF16), autocast(DEVICE, FP16)
    outer.__enter__()
    inner.__enter__()
    assert outer.__exit__(KeyError, KeyError(), None) is None
    inner.__exit__(None, None, None)
    assert_nothing_is_left()


# --- with the rest of PyTorch ---------------------------------------------------------------------


def test_attention() -> None:
    x = torch.randn(3, 5, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    with autocast(DEVICE, BF16):
        out, weights = attention(x, x, x)
        assert (out.dtype, weights.dtype) == (BF16, FP32)  # softmax in float32, as on CUDA
        out, _ = attention(x, x, x, need_weights=False)
        assert out.dtype == BF16


@pytest.mark.parametrize("policy", ["standard", "torch"])
@pytest.mark.parametrize("layer", [nn.LSTM(8, 4, 2), nn.GRU(8, 4), nn.RNN(8, 4)])
def test_recurrent_layers_do_what_they_do_under_torch_autocast(layer, policy):
    x = torch.randn(3, 5, 8)

    def output_and_gradients(context: object) -> list[Tensor]:
        layer.zero_grad()
        with context:  # type: ignore[attr-defined]
            result = layer(x)[0]
        result.float().sum().backward()
        return [result, *(p.grad for p in layer.parameters() if p.grad is not None)]

    result, *gradients = output_and_gradients(autocast(DEVICE, BF16, policy=policy))
    expected, *rounded = output_and_gradients(torch.autocast(DEVICE, BF16))
    assert torch.equal(result, expected)
    assert result.dtype == expected.dtype
    for got, want in zip(gradients, rounded, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-8)  # PyTorch's: in bfloat16


def test_transformer_layer_in_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), autocast(DEVICE, BF16):
        assert layer(x).isfinite().all()


def test_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with torch.inference_mode(), autocast(DEVICE, BF16):
        assert model(torch.randn(2, 4)).dtype == FP32
    with torch.inference_mode():
        inference_weight = torch.randn(4, 4)
        with autocast(DEVICE, BF16):
            assert F.linear(torch.ones(2, 4), inference_weight).dtype == BF16


def test_gradients_equal_those_of_casting_by_hand() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    with autocast(DEVICE, BF16):
        hidden = F.linear(x, weight)
        loss = (F.softmax(hidden, -1) * F.linear(hidden, weight)).sum()
    got = torch.autograd.grad(loss, (weight, x))

    hidden = F.linear(x.to(BF16), weight.to(BF16))
    product = F.linear(hidden, weight.to(BF16))
    loss = (F.softmax(hidden, -1, dtype=FP32) * product).sum(dtype=FP32)
    expected = torch.autograd.grad(loss, (weight, x))
    assert_same(got, expected)


# --- lightness ------------------------------------------------------------------------------------


def calls_of_ours(function: Callable[[], object]) -> list[str]:
    """Return the functions of halfstep that are called once all that is kept is kept."""
    function()
    function()
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/halfstep/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


def test_a_context_takes_few_calls() -> None:
    def enter() -> None:
        with autocast(DEVICE, BF16):
            pass

    outermost = calls_of_ours(enter)
    assert len(outermost) <= (12 if VERSION >= "2.13" else 20), outermost
    with autocast(DEVICE, BF16):  # torch.compile need not be told again
        assert len(calls_of_ours(enter)) <= 8


def test_an_op_with_a_small_weight_takes_few_calls() -> None:
    x, weight = torch.ones(1, 2), nn.Parameter(torch.ones(2, 2))
    with autocast(DEVICE, BF16):
        called = calls_of_ours(lambda: F.linear(x, weight))
    assert len(called) <= 6, called


@pytest.mark.parametrize(
    ("call", "note"),
    [
        (lambda h: h.masked_fill(h > 0, -1e10), 'policy="standard; masked_fill:fp32"'),
        (lambda h: F.pad(h, (1, 1), value=1e10), 'policy="standard; pad:fp32"'),
        (lambda h: h.masked_fill_(h > 0, -1e10), "halfstep: torch.finfo(x.dtype).min"),
    ],
)
def test_an_error_about_a_number_that_does_not_fit_has_its_cure(call: Any, note: str) -> None:
    with (
        pytest.raises(RuntimeError, match="without overflow") as caught,
        autocast(DEVICE, torch.float16),
    ):
        call(F.linear(torch.ones(2, 2), torch.ones(2, 2)))
    assert note in caught.value.__notes__[0]
