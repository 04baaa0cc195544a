"""The block: state after it, nesting, threads, and wrong use."""

import threading

import pytest
import torch
from tests.training import mlp
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

import halfstep
from halfstep import simulate
from halfstep._numerics.formats import FORMATS, rounded
from halfstep._pytorch import amp, modes
from halfstep.errors import CallOrderError

pytestmark = pytest.mark.slow

ALL = pytest.mark.parametrize("format", FORMATS)


MODEL = mlp(8, 8, 4, between=nn.ReLU)
X = torch.linspace(-3, 3, 16).view(2, 8)


def state() -> tuple[object, ...]:
    return (
        modes.dispatch_modes(),
        torch.overrides._len_torch_function_stack(),
        amp.autocast_switches("cpu"),
        len(_global_forward_hooks),
        len(_global_forward_pre_hooks),
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
    )


@ALL
def test_after_the_block_all_is_as_before(format: str) -> None:
    before, plain, names = state(), MODEL(X), [type(m) for m in MODEL.modules()]
    with halfstep.autocast("cpu", torch.bfloat16):
        lowered = MODEL(X)
    with simulate(MODEL, format):
        assert not torch.equal(MODEL(X).float(), plain)
    assert state() == before
    assert torch.equal(MODEL(X), plain)
    assert all(p.grad is None and p.dtype == torch.float32 for p in MODEL.parameters())
    assert [type(m) for m in MODEL.modules()] == names
    with halfstep.autocast("cpu", torch.bfloat16):
        assert torch.equal(MODEL(X), lowered)
    with halfstep.trace(MODEL) as t:  # the rules are told to others again
        MODEL(X)
    assert len(t.ops) == 3


@ALL
def test_after_an_error_too(format: str) -> None:
    before = state()
    s = simulate(MODEL, format)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), s:
        MODEL[1:](MODEL[:2](X)[:, :5])
    assert state() == before
    assert s.rows()
    with halfstep.trace(MODEL):
        pass


@ALL
def test_in_nested_blocks_the_inner_one_decides(format: str) -> None:
    with simulate(MODEL, format):
        wanted = MODEL(X)
    for outside in FORMATS:
        with simulate(MODEL, outside):
            around = MODEL(X)
        with simulate(MODEL, outside) as outer:
            assert torch.equal(MODEL(X), around)
            with simulate(MODEL, format) as inner:
                y = MODEL(X)
                y.sum().backward()
            assert torch.equal(y, wanted)
            assert y.dtype == wanted.dtype
            assert torch.equal(MODEL(X), around)
        assert {row["phase"] for row in inner.rows()} == {"forward", "backward"}
        if outside != format:
            assert {row["phase"] for row in outer.rows()} == {"forward"}


def test_threads_do_not_see_each_other() -> None:
    wanted = {}
    for format in FORMATS:
        with simulate(MODEL, format) as s:
            wanted[format] = MODEL(X), s.rows()
    plain = MODEL(X)
    found, barrier = {}, threading.Barrier(len(FORMATS) + 1)

    def work(format: str | None) -> None:
        barrier.wait()
        if format is None:
            found[None] = [MODEL(X) for _ in range(20)], None
            return
        with simulate(nn.Sequential(*MODEL), format) as s:
            outputs = [nn.Sequential(*MODEL)(X) for _ in range(20)]
        found[format] = outputs, s.rows()

    threads = [threading.Thread(target=work, args=(format,)) for format in (*FORMATS, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, plain) for y in found[None][0])
    for format in FORMATS:
        outputs, rows = found[format]
        assert all(torch.equal(y, wanted[format][0]) for y in outputs)
        assert sum(r["values"] for r in rows) == 20 * sum(r["values"] for r in wanted[format][1])


def test_weights_cast_before_the_block_are_counted_and_none_are_kept() -> None:
    model, x = nn.Linear(256, 256, bias=False), torch.randn(2, 256)  # smaller ones are never kept
    with halfstep.autocast("cpu", torch.float16):
        for _ in range(3):
            model(x)
        for format in FORMATS:
            with simulate(model, format) as s:
                model(x)
            assert s.rows()[0]["values"] >= 256 * 256


def test_the_dtype_may_be_one_or_a_name() -> None:
    for name, format in FORMATS.items():
        assert simulate(MODEL, name).format is simulate(MODEL, format.dtype).format is format
    assert simulate(MODEL).format is FORMATS["fp16"]


def test_the_policy_may_be_one_or_a_text() -> None:
    policy = halfstep.Policy.parse("standard; linear:fp32")
    for each in (policy, str(policy)):
        with simulate(MODEL, "e4m3", policy=each) as s:
            MODEL(X)
        assert s.rows() == []
        assert "policy standard; linear:fp32" in repr(s)


def test_products_with_results_in_float32_are_lowered_too() -> None:
    def run(policy: str) -> tuple[Tensor, object]:
        with simulate(MODEL, "e4m3", policy=policy) as s:
            y = MODEL(X)
        return y, s.rows()

    (y, rows), (expected, expected_rows) = run("standard; linear:fp32-out"), run("standard")
    assert torch.equal(y, expected)
    assert rows == expected_rows != []


def test_ops_outside_of_the_model_are_lowered_too() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with simulate(nn.Module(), "e4m3") as s:
        y = a @ b
    held = [rounded(t, FORMATS["e4m3"], saturate=True) for t in (a, b)]
    assert torch.equal(y, held[0] @ held[1])
    assert s.rows()[0]["module"] == ""


# --- wrong use ------------------------------------------------------------------------------------


def test_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"simulate\(function\): pass the model, a torch.nn.Module"):
        simulate(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp15", "float32", torch.float32, None, 16])
def test_an_unknown_format_names_those_there_are(dtype: object) -> None:
    with pytest.raises(ValueError, match="simulate: unknown format") as caught:
        simulate(MODEL, dtype)  # type: ignore[arg-type]
    for format in FORMATS.values():
        assert f"{format.name!r} ({format.dtype})" in str(caught.value)
    assert ("did you mean 'fp16'" in str(caught.value)) == (dtype == "fp15")


@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_a_scale_for_each_tensor_is_for_eight_bits(format: str) -> None:
    with pytest.raises(ValueError, match=f"scale_by_amax is for e4m3 and e5m2; {format} is"):
        simulate(MODEL, format, scale_by_amax=True)


@ALL
def test_a_wrong_policy(format: str) -> None:
    with pytest.raises(ValueError, match="no module of this Sequential is named like '7'"):
        simulate(MODEL, format, policy="standard; @7:fp32")
    with pytest.raises(ValueError, match="there is no op 'liner'"):
        simulate(MODEL, format, policy="standard; liner:fp32")
    with pytest.raises(TypeError, match="policy must be a Policy or its text"):
        simulate(MODEL, format, policy=3)  # type: ignore[arg-type]


def test_not_while_a_trace_runs_and_no_trace_in_it() -> None:
    before = state()
    with (
        halfstep.trace(MODEL),
        pytest.raises(CallOrderError, match="simulate cannot run while a trace"),
        simulate(MODEL),
    ):
        pass
    with simulate(MODEL), pytest.raises(CallOrderError), halfstep.trace(MODEL):
        pass
    assert state() == before


def test_an_object_runs_once() -> None:
    with simulate(MODEL) as s:
        MODEL(X)
        with pytest.raises(CallOrderError, match="this simulation has run; make another"):
            s.__enter__()
    with pytest.raises(CallOrderError, match="this simulation has run; make another"):
        s.__enter__()


def test_a_simulation_is_left_in_its_thread() -> None:
    errors = []

    def leave() -> None:
        try:
            s.__exit__(None, None, None)
        except CallOrderError as error:
            errors.append(str(error))

    with simulate(MODEL) as s:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert MODEL(X).dtype == torch.float16
    assert "in a thread that did not enter it" in errors[0]
