"""What rows know of dtypes by their names, against PyTorch."""

import itertools

import pytest
import torch

from halfstep._common.formats import dtype_name
from halfstep._tools.trace.rows import is_float, itemsize, promoted

DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PAIRS = list(itertools.product(FLOATS, repeat=2))
SHAPES = list(itertools.product([(), (2,)], repeat=2))


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_a_dtype_is_known_by_its_name(dtype: torch.dtype) -> None:
    name = dtype_name(dtype)
    assert (is_float(name), itemsize(name)) == (dtype.is_floating_point, dtype.itemsize)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_dtypes_are_promoted_as_by_pytorch(dtypes, shapes):
    one, other = (torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    found = promoted((dtype_name(x.dtype), tuple(x.shape)) for x in (one, other))
    assert found == dtype_name((one + other).dtype)


def test_a_float8_and_a_wider_dtype_are_promoted_to_that() -> None:
    """PyTorch has no promotion for it; products of float8 return a wider dtype."""
    assert promoted([("float8_e4m3fn", (2,)), ("bfloat16", (2,))]) == "bfloat16"


def test_integers_are_not_promoted() -> None:
    assert promoted([("int64", (2,)), ("bool", (2,))]) == ""
    assert promoted([("int64", (2,)), ("float16", ())]) == "float16"
