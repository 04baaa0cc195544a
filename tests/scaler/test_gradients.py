"""The passes over gradients against a slow loop over the parameters."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.device import DEVICE, seeded

from halfstep._gradients import gradients as collecting
from halfstep._gradients import scalars
from halfstep._gradients.gradients import clip_coefficient, norms_of, overflows_when_divided


def optimizer_over(*grads: torch.Tensor) -> torch.optim.Optimizer:
    params = []
    for grad in grads:
        param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
        param.grad = grad
        params.append(param)
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=1.0)


def reference_unscale(grads: list[torch.Tensor], scale: float) -> tuple[list[torch.Tensor], bool]:
    """One parameter at a time, in float64, on new tensors."""
    out, found = [], False
    for grad in grads:
        dense = grad.coalesce().to_dense() if grad.is_sparse else grad.resolve_conj()
        wide = torch.complex128 if dense.is_complex() else torch.float64
        unscaled = (dense.to(wide) / scale).to(dense.dtype)
        found = found or not bool(dense.isfinite().all() and unscaled.isfinite().all())
        out.append(unscaled)
    return out, found


def sparse(indices: list[int], values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([indices]), torch.tensor(values, dtype=dtype), (4,), check_invariants=True
    )


def make_grads(kind: str) -> list[torch.Tensor]:
    generator = seeded(3)
    dense = torch.randn(6, 8, generator=generator)
    return {
        "contiguous": [dense],
        "transposed": [dense.t()],
        "sliced": [dense[:, ::2], dense[1:3, 1:5]],
        "channels_last": [torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)],
        "scalar_and_empty": [torch.tensor(3.0), torch.zeros(0, 4)],
        "mixed_dtypes": [dense, dense.double(), dense.bfloat16(), dense.half(), dense[0]],
        "complex": [torch.randn(5, dtype=torch.complex64), torch.randn(2, dtype=torch.complex128)],
        "conjugate": [torch.randn(5, dtype=torch.complex64).conj()],
        "sparse": [sparse([0, 2], [1.0, 2.0], torch.float32)],
        "uncoalesced": [sparse([1, 1, 3], [1.0, 2.0, 4.0], torch.float32), dense],
        "uncoalesced_half": [sparse([1, 1, 3], [1.0, 2.0, 4.0], torch.float16)],
    }[kind]


KINDS = [
    "contiguous",
    "transposed",
    "sliced",
    "channels_last",
    "scalar_and_empty",
    "mixed_dtypes",
    "complex",
    "conjugate",
    "sparse",
    "uncoalesced",
    "uncoalesced_half",
]


CPU = torch.device(DEVICE)


def collect(optimizer: torch.optim.Optimizer) -> collecting.Gradients:
    return collecting.collect(collecting.parameters(optimizer))


def unscale(optimizer: torch.optim.Optimizer, scale: float, *, can_amplify: bool) -> bool:
    found = collect(optimizer).unscale_(torch.tensor(scale), can_amplify=can_amplify)
    return bool(scalars.combine(found.values(), CPU))


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_unscale_against_the_loop(kind: str, bad: float | None) -> None:
    grads = [grad.clone() for grad in make_grads(kind)]
    if bad is not None:
        last = next(grad for grad in reversed(grads) if grad.numel())
        entries = last._values() if last.is_sparse else last
        entries[(-1,) * entries.dim()] = bad
    expected, expected_found = reference_unscale(grads, 8.0)
    optimizer = optimizer_over(*grads)
    assert unscale(optimizer, 8.0, can_amplify=False) == expected_found == (bad is not None)
    for param, want in zip(params_of(optimizer), expected, strict=True):
        got = param.grad.to_dense() if param.grad.is_sparse else param.grad
        assert torch.equal(got.resolve_conj().nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_measure_against_the_loop_and_changes_nothing(kind: str, bad: float | None) -> None:
    grads = [grad.clone() for grad in make_grads(kind)]
    if bad is not None:
        last = next(grad for grad in reversed(grads) if grad.numel())
        entries = last._values() if last.is_sparse else last
        entries[(-1,) * entries.dim()] = bad
    before, _ = reference_unscale(grads, 1.0)
    optimizer = optimizer_over(*grads)
    norms = norms_of(collect(optimizer), torch.tensor(4.0), CPU)
    unscaled = norms.unscaled()
    for got, grad in zip(unscaled, before, strict=True):
        want = torch.linalg.vector_norm(torch.view_as_real(grad) if grad.is_complex() else grad)
        assert math.isfinite(got) == bool(grad.isfinite().all())
        if math.isfinite(got):
            assert got == pytest.approx(
                want.item() / 4.0, rel=1e-2 if grad.dtype.itemsize < 4 else 1e-6
            )
    assert math.isfinite(norms.norm) == (bad is None)
    if bad is None:
        assert float(norms.norm) == pytest.approx(math.hypot(*unscaled), rel=1e-6)
    for param, want in zip(params_of(optimizer), before, strict=True):
        got = param.grad.to_dense() if param.grad.is_sparse else param.grad
        assert torch.equal(got.resolve_conj().nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize(
    ("norm", "max_norm", "expected"),
    [
        (4.0, 1.0, 0.25),
        (0.5, 1.0, 1.0),
        (0.0, 1.0, 1.0),
        (4.0, 0.0, 0.0),
        (4.0, math.inf, 1.0),
        (math.inf, 1.0, 1.0),
        (math.nan, 1.0, 1.0),
    ],
)
def test_clip_coefficient(norm: float, max_norm: float, expected: float) -> None:
    got = clip_coefficient(torch.tensor(norm, dtype=torch.float64), max_norm)
    assert got.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_halves_that_overflow_when_coalesced_are_found(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    optimizer = optimizer_over(sparse([2, 2], [most, most], dtype))
    assert unscale(optimizer, 65536.0, can_amplify=False)


def test_layout_and_identity_are_kept() -> None:
    grad = torch.randn(6, 8).t()
    optimizer = optimizer_over(grad)
    unscale(optimizer, 2.0, can_amplify=False)
    (param,) = params_of(optimizer)
    assert param.grad is grad
    assert grad.stride() == (1, 8)


def test_parameters_without_gradients_are_left_out() -> None:
    optimizer = optimizer_over(torch.ones(2), torch.ones(3))
    params_of(optimizer)[0].grad = None
    found = collect(optimizer)
    assert [grad.shape for grad in found.values] == [(3,)]
    assert found.params == [params_of(optimizer)[1]]
    params_of(optimizer)[1].grad = None
    assert collect(optimizer).grads == []


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=4), st.floats(2.0**-126, 2.0**127, width=32)
)
def test_nothing_that_is_not_finite_is_called_finite(values: list[float], scale: float) -> None:
    grad = torch.tensor(values)
    optimizer = optimizer_over(grad)
    found = unscale(optimizer, scale, can_amplify=scale < 1.0)
    assert found or bool(grad.isfinite().all())
    # And nothing is called overflow that is none.
    expected, _ = reference_unscale([torch.tensor(values)], scale)
    finite = all(map(math.isfinite, values)) and bool((expected[0].abs() < 1e38).all())
    assert not (found and finite)


def test_a_scale_below_one_needs_the_second_look() -> None:
    optimizer = optimizer_over(torch.tensor([3e38]))
    assert not unscale(optimizer, 0.5, can_amplify=False)
    assert params_of(optimizer)[0].grad.isinf().all()
    optimizer = optimizer_over(torch.tensor([3e38]))
    assert unscale(optimizer, 0.5, can_amplify=True)


def test_gradients_are_sorted_by_device_and_dtype() -> None:
    """The CUDA kernel takes tensors of one dtype; the CPU kernel would not mind."""
    collected = collect(optimizer_over(*make_grads("mixed_dtypes"))).by_kind
    here = torch.empty(0).device
    assert {key: len(group) for key, group in collected.items()} == {
        (here, torch.float32): 2,
        (here, torch.float64): 1,
        (here, torch.bfloat16): 1,
        (here, torch.float16): 1,
    }
    for (device, dtype), group in collected.items():
        assert all(grad.device == device and grad.dtype == dtype for grad in group)


def test_float16_is_refused_with_names() -> None:
    found = collect(optimizer_over(*[torch.ones(2, 3, dtype=torch.float16) for _ in range(5)]))
    with pytest.raises(ValueError, match="SGD has float16 gradients") as error:
        collecting.refuse_float16(found, "SGD", list("abcde"))
    text = str(error.value)
    where = torch.empty(0).device
    assert f"a (float16[2, 3] on {where}), b (float16[2, 3] on {where})" in text
    assert f"c (float16[2, 3] on {where}) and 2 more" in text
    assert "Cause: these parameters are stored in float16 (model.half()" in text
    assert "Cure: keep the parameters in float32 (model.float())" in text


@pytest.mark.parametrize(
    "grad",
    [
        torch.ones(1).expand(6),
        torch.ones(2, 1).expand(2, 3),
        torch._neg_view(-torch.ones(6)),
        torch.ones(6, dtype=torch.complex64).conj(),
    ],
    ids=["expanded", "expanded rows", "negative view", "conjugate"],
)
def test_gradients_that_cannot_be_written_to_are_replaced(grad: torch.Tensor) -> None:
    param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad
    before = grad.clone()
    found = collecting.collect([param])
    found.multiply_(torch.tensor(0.5))
    assert torch.equal(param.grad, before / 2)
    assert torch.equal(grad, before)


def test_another_sparse_layout_is_refused_before_anything_changes() -> None:
    expanded = torch.nn.Parameter(torch.zeros(2))
    expanded.grad = torch.ones(1).expand(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "Sparse CSR tensor support is in beta"
        rows = torch.nn.Parameter(torch.ones(2, 2).to_sparse_csr())
        rows.grad = torch.ones(2, 2).to_sparse_csr()
    with pytest.raises(TypeError, match=r"float32\[2, 2\] on \S+ in the layout torch.sparse_csr"):
        collecting.collect([expanded, rows])
    assert expanded.grad.stride() == (0,)


@pytest.mark.parametrize("scale", [0.5, 2.0**-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_overflow_by_division_is_foreseen(dtype: torch.dtype, scale: float) -> None:
    most = torch.finfo(dtype).max
    for entry, overflows in [(most * scale, False), (most, True)]:
        grad = torch.tensor([0.0, -entry], dtype=dtype)
        found = overflows_when_divided(collect(optimizer_over(grad)), torch.tensor(scale))
        assert bool(scalars.combine(found, CPU)) == overflows
        unscaled = grad * torch.tensor(1 / scale)
        assert bool(unscaled.isinf().any()) == overflows
