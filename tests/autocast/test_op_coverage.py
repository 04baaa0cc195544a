"""Ops that a network calls after a linear layer: none raises or leaves the range under autocast.

Each is called with an input in float32, bfloat16 and float16 and compared with float32.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.autocast.versions import has_op
from tests.device import DEVICE
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

from halfstep._autocast import autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 2e-2, FP16: 3e-3, FP32: 1e-4, torch.complex64: 1e-4}
Call = Callable[[Tensor], Any]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.(cholesky|qr) is deprecated"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
]

torch.manual_seed(0)
MATRIX = torch.randn(4, 4)
DEFINITE = MATRIX @ MATRIX.T + 4 * torch.eye(4)
VECTOR = torch.randn(64)
BETWEEN = torch.rand(8) * 0.8 + 0.1
IMAGE = torch.randn(2, 3, 8, 8)
SOUND = torch.randn(2, 3, 16)
VOLUME = torch.randn(2, 3, 4, 8, 8)
SEQUENCE = torch.randn(2, 5, 8)
TABLE = torch.randn(10, 8)
WINDOW = torch.hann_window(16)
INDEX = torch.randint(10, (2, 4))
GRID = torch.rand(2, 4, 4, 2) * 2 - 1
LOG_PROBABILITIES = torch.randn(6, 2, 5).log_softmax(-1)
WEIGHT = torch.randn(3, 4, 4)
COMPLEX = torch.randn(4, 4, dtype=torch.complex64)


def of(name: str, *args: Any, **kwargs: Any) -> Call:
    """Return the call of ``torch.<name>`` with these arguments after the input."""
    op = torch
    for part in name.split("."):
        op = getattr(op, part)
    return lambda x: op(x, *args, **kwargs)  # type: ignore[operator]


# --- ops without a kernel in lower precision: float32 ---------------------------------------------

FFTS = [
    f"fft.{inverse}{kind}{dims}"
    for inverse, kind, dims in itertools.product(("", "i"), ("fft", "rfft", "hfft"), ("", "2", "n"))
]
FACTORS = (
    "cholesky cholesky_ex cond det eigh eigvals eigvalsh inv inv_ex ldl_factor ldl_factor_ex lu "
    "lu_factor lu_factor_ex matrix_exp matrix_norm matrix_rank matrix_sqrth norm pinv polar qr "
    "slogdet svd svdvals vander vector_norm"
)
OF_A_MATRIX = "cholesky det geqrf inverse logdet matrix_exp pinverse qr slogdet svd"
SPECIAL = (
    "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx log_ndtr modified_bessel_i0 "
    "modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtri scaled_modified_bessel_k0 "
    "scaled_modified_bessel_k1 spherical_bessel_j0"
)
POLYNOMIALS = (
    "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
    "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p "
    "shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u "
    "shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w"
)

IN_FLOAT32: dict[str, tuple[Tensor, Call]] = {
    **{name: (MATRIX, of(name)) for name in FFTS},
    **{
        f"linalg.{name}": (DEFINITE, of(f"linalg.{name}"))
        for name in FACTORS.split()
        if has_op(f"linalg_{name}")
    },
    **{name: (DEFINITE, of(name)) for name in OF_A_MATRIX.split() if has_op(name)},
    **{f"special.{name}": (BETWEEN, of(f"special.{name}")) for name in SPECIAL.split()},
    **{f"special.{name}": (BETWEEN, of(f"special.{name}", 3)) for name in POLYNOMIALS.split()},
    "special.i1": (VECTOR, of("special.i1")),
    "special.i1e": (VECTOR, of("special.i1e")),
    "special.zeta": (BETWEEN + 2, of("special.zeta", 2.0)),
    "linalg.matrix_norm, nuclear": (DEFINITE, of("linalg.matrix_norm", "nuc")),
    "linalg.matrix_norm, spectral": (DEFINITE, of("linalg.matrix_norm", 2)),
    "linalg.norm, nuclear": (DEFINITE, of("linalg.norm", "nuc")),
    "linalg.solve": (DEFINITE, of("linalg.solve", torch.eye(4))),
    "linalg.solve_ex": (DEFINITE, of("linalg.solve_ex", torch.eye(4))),
    "linalg.solve_triangular": (DEFINITE, of("linalg.solve_triangular", torch.eye(4), upper=True)),
    "linalg.lstsq": (DEFINITE, lambda x: torch.linalg.lstsq(x, torch.eye(4)).solution),
    "linalg.lu_solve": (
        MATRIX,
        lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(DEFINITE), x),
    ),
    "linalg.ldl_solve": (
        MATRIX,
        lambda x: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(DEFINITE), x),
    ),
    "linalg.householder_product": (MATRIX, lambda x: torch.linalg.householder_product(x, x[0])),
    "stft": (VECTOR, of("stft", 16, window=WINDOW, return_complex=True)),
    "stft and back": (
        VECTOR,
        lambda x: torch.istft(
            torch.stft(x, 16, window=WINDOW, return_complex=True), 16, window=WINDOW
        ),
    ),
    "complex": (MATRIX, lambda x: torch.complex(x, MATRIX)),
    "polar": (MATRIX, lambda x: torch.polar(x, x)),
    "quantile": (VECTOR, of("quantile", 0.3)),
    "histogram": (VECTOR, of("histogram", 4, range=(-10.0, 10.0))),
    "histogramdd": (MATRIX[:, :2], of("histogramdd", [2, 2], range=[-9.0, 9.0, -9.0, 9.0])),
    "sparse.softmax": (MATRIX, lambda x: torch.sparse.softmax(x.to_sparse(), 1).to_dense()),
    "cdist": (MATRIX, of("cdist", MATRIX)),
    "pdist": (MATRIX, F.pdist),
    "avg_pool3d": (VOLUME, lambda x: F.avg_pool3d(x, 2)),
    "interpolate, bicubic": (IMAGE, lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    "ctc_loss": (
        LOG_PROBABILITIES,
        lambda x: F.ctc_loss(
            x, torch.tensor([[1, 2], [3, 4]]), torch.tensor([6, 6]), torch.tensor([2, 2])
        ),
    ),
}

# --- with a float32 tensor beside the input: the widest decides -----------------------------------

WITH_FLOAT32: dict[str, tuple[Tensor, Call]] = {
    "lerp": (MATRIX, of("lerp", DEFINITE, 0.3)),
    "lerp, weight": (MATRIX, lambda x: torch.lerp(x, -x, DEFINITE)),
    "heaviside": (MATRIX, of("heaviside", DEFINITE)),
    "linalg.cross": (MATRIX[:, :3], of("linalg.cross", DEFINITE[:, :3])),
    "meshgrid": (MATRIX[0], lambda x: torch.meshgrid(x, DEFINITE[0], indexing="ij")),
    "embedding_bag": (
        torch.rand(2, 4),
        lambda x: F.embedding_bag(INDEX, TABLE, mode="sum", per_sample_weights=x),
    ),
    "embedding_bag, table": (
        TABLE,
        lambda x: F.embedding_bag(INDEX, x, mode="sum", per_sample_weights=torch.ones(2, 4)),
    ),
    "grid_sample": (IMAGE, lambda x: F.grid_sample(x, GRID, align_corners=False)),
    "bilinear": (MATRIX, lambda x: F.bilinear(x, DEFINITE, WEIGHT)),
}

# --- in lower precision, or as the input is: PyTorch has kernels ----------------------------------

PADS = ("constant", "reflect", "replicate", "circular")
AS_IT_IS: dict[str, tuple[Tensor, Call]] = {
    "histc": (VECTOR, of("histc", 4, -9, 9)),
    "sort": (VECTOR, of("sort")),
    "topk": (VECTOR, of("topk", 3)),
    "unfold": (IMAGE, lambda x: F.unfold(x, 3)),
    "fold": (torch.randn(2, 27, 36), lambda x: F.fold(x, (8, 8), 3)),
    "embedding_bag": (TABLE, lambda x: F.embedding_bag(INDEX, x, mode="mean")),
    "max_pool2d": (IMAGE, lambda x: F.max_pool2d(x, 2)),
    "pixel_shuffle": (torch.randn(2, 4, 4, 4), lambda x: F.pixel_shuffle(x, 2)),
    **{
        f"pad {mode} {x.dim() - 2}d": (
            x,
            lambda x, mode=mode: F.pad(x, (1, 1) * (x.dim() - 2), mode),
        )
        for mode in PADS
        for x in (SOUND, IMAGE, VOLUME)
    },
}
NETWORKS: dict[str, tuple[Tensor, Any]] = {
    "LSTM": (SEQUENCE, nn.LSTM(8, 6, bidirectional=True, batch_first=True)),
    "LSTM, projection": (SEQUENCE, nn.LSTM(8, 6, proj_size=3)),
    "GRU": (SEQUENCE, nn.GRU(8, 6, num_layers=2)),
    "RNN": (SEQUENCE, nn.RNN(8, 6)),
    "LSTMCell": (SEQUENCE[0], nn.LSTMCell(8, 6)),
    "GRUCell": (SEQUENCE[0], nn.GRUCell(8, 6)),
    "MultiheadAttention": (SEQUENCE, nn.MultiheadAttention(8, 2, batch_first=True)),
    "TransformerEncoderLayer": (SEQUENCE, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
    "weight_norm": (SEQUENCE, parametrizations.weight_norm(nn.Linear(8, 4))),
    "spectral_norm": (SEQUENCE, parametrizations.spectral_norm(nn.Linear(8, 4))),
    "orthogonal": (SEQUENCE, parametrizations.orthogonal(nn.Linear(8, 8))),
}
for _, network in NETWORKS.values():
    network.eval()

MIXES = list(itertools.product((BF16, FP16), (FP32, BF16, FP16)))
mixes = pytest.mark.parametrize(("lower", "given"), MIXES)


def results(call: Call, *args: Tensor) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(call(*args)) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


def compare(got: list[Tensor], expected: list[Tensor], lower: torch.dtype) -> None:
    """Compare with float32 results from the same values; lower is the roughest dtype met."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        atol = ROUNDING[lower] * max(1.0, other.abs().max().item())
        assert torch.allclose(one.to(other.dtype), other, rtol=0, atol=atol, equal_nan=True)


@mixes
@pytest.mark.parametrize("op", IN_FLOAT32)
def test_in_float32(op: str, lower: torch.dtype, given: torch.dtype) -> None:
    x, call = IN_FLOAT32[op]
    x = x.to(given)
    with autocast(DEVICE, lower):
        got = results(call, x)
    assert {each.dtype for each in got} <= {FP32, torch.complex64}
    compare(got, results(call, x.float()), FP32)


@mixes
@pytest.mark.parametrize("op", WITH_FLOAT32)
def test_beside_a_float32_tensor(op: str, lower: torch.dtype, given: torch.dtype) -> None:
    x, call = WITH_FLOAT32[op]
    x = x.to(given)
    with autocast(DEVICE, lower):
        got = results(call, x)
    assert {each.dtype for each in got} == {FP32}
    compare(got, results(call, x.float()), FP32)


@mixes
@pytest.mark.parametrize("op", AS_IT_IS)
def test_as_it_is(op: str, lower: torch.dtype, given: torch.dtype) -> None:
    x, call = AS_IT_IS[op]
    x = x.to(given)
    with autocast(DEVICE, lower):
        got = results(call, x)
    assert {each.dtype for each in got} == {given}
    compare(got, results(call, x.float()), given)


@mixes
@pytest.mark.parametrize("inference", [False, True], ids=["train", "inference"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, inference: bool, lower: torch.dtype, given: torch.dtype) -> None:
    """Without gradients PyTorch takes the fast path of the transformer and of oneDNN's LSTM."""
    x, network = NETWORKS[name]
    args = (x.to(given),) * (3 if name == "MultiheadAttention" else 1)
    with torch.inference_mode(inference):
        with autocast(DEVICE, lower):
            got = results(network, *args)
        expected = results(network, *(arg.float() for arg in args))
    assert {each.dtype for each in got} <= {FP32, lower, given}
    compare(got, expected, BF16 if BF16 in (lower, given) else FP16)


WITHOUT_A_DERIVATIVE = {
    "geqrf",
    "heaviside",
    "histogram",
    "histogramdd",
    "linalg.ldl_factor",
    "linalg.ldl_factor_ex",
    "linalg.ldl_solve",
    "linalg.matrix_rank",
    "special.zeta",
    *(f"special.{name}" for name in POLYNOMIALS.split()),
    *(f"special.{name}" for name in SPECIAL.split() if "bessel" in name or "airy" in name),
}


@pytest.mark.parametrize("op", sorted((IN_FLOAT32 | WITH_FLOAT32).keys() - WITHOUT_A_DERIVATIVE))
@pytest.mark.parametrize("given", [BF16, FP16])
def test_gradients_have_the_dtype_of_the_input(op: str, given: torch.dtype) -> None:
    x, call = (IN_FLOAT32 | WITH_FLOAT32)[op]
    x = x.to(given).requires_grad_()
    with autocast(DEVICE, given):
        total = sum(each.abs().sum() for each in results(call, x))
    (gradient,) = torch.autograd.grad(total, x)
    assert gradient.dtype is given


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: torch.tensor(20.0, dtype=FP16).exp2(), 2.0**20),
        (lambda: torch.tensor(15.0, dtype=FP16).i0(), 339649.37),
        (lambda: torch.special.i1(torch.tensor(15.0, dtype=FP16)), 328124.92),
        (lambda: torch.tensor([-1e4, 1e4], dtype=FP16).var(), 2e8),
        (lambda: torch.var_mean(torch.tensor([-1e4, 1e4], dtype=FP16))[0], 2e8),
        (lambda: torch.ones(70000, dtype=FP16).nansum(), 70000.0),
    ],
)
def test_float16_does_not_overflow(call: Callable[[], Tensor], expected: float) -> None:
    with autocast(DEVICE, FP16):
        assert call().item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("op", ["exp2", "i0", "var"])
def test_bfloat16_keeps_what_has_room_there(op: str) -> None:
    with autocast(DEVICE, BF16):
        assert of(op)(VECTOR.to(BF16)).dtype is BF16


def test_isclose_and_allclose_take_a_mix() -> None:
    with autocast(DEVICE, BF16):
        assert torch.isclose(torch.ones(2, dtype=BF16), torch.ones(2)).all()
        assert torch.allclose(torch.ones(2, dtype=BF16), torch.ones(2))


TAKEN_BY_COMPLEX = (
    "abs angle exp fft.fft linalg.inv linalg.matrix_norm linalg.vector_norm log mean norm prod "
    "reciprocal sum"
)
OF_COMPLEX: dict[str, Call] = {
    "linear": lambda x: F.linear(x, x, x[0]),
    "matmul": lambda x: x @ x,
    "einsum": lambda x: torch.einsum("ij,jk", x, x),
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    **{name: of(name) for name in TAKEN_BY_COMPLEX.split()},
    "pow": of("pow", 2),
    "cumsum": of("cumsum", 0),
    "renorm": of("renorm", 2, 0, 1.0),
    "cat": lambda x: torch.cat([x, MATRIX]),
    "times a real": lambda x: x * MATRIX,
    "index_put_": lambda x: x.clone().index_put_((torch.tensor([0]),), x[:1] + 1),
}


@pytest.mark.parametrize("lower", [BF16, FP16])
@pytest.mark.parametrize("op", OF_COMPLEX)
def test_complex_inputs_are_not_touched(op: str, lower: torch.dtype) -> None:
    expected = OF_COMPLEX[op](COMPLEX)
    with autocast(DEVICE, lower):
        result = OF_COMPLEX[op](COMPLEX)
    assert result.dtype is expected.dtype
    assert torch.equal(result, expected)
