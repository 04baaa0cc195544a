"""Limits of formats, against casts of PyTorch."""

import math

import pytest
import torch

from halfstep._common.formats import FORMATS, Format


def rounded(value: float, format: Format) -> float:
    return torch.tensor(value, dtype=torch.float32).to(format.dtype).float().item()


def after(value: float) -> float:
    return torch.nextafter(torch.tensor(value), torch.tensor(math.inf)).item()


def before(value: float) -> float:
    return torch.nextafter(torch.tensor(value), torch.tensor(0.0)).item()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_largest_values(format: Format) -> None:
    assert rounded(format.largest, format) == format.largest
    assert rounded(format.last_held, format) == format.largest
    # There is no inf in e4m3 to become: PyTorch from 2.13 on it saturates, before it gives NaN.
    beyond = rounded(after(format.last_held), format)
    if format.name == "e4m3":
        assert beyond == format.largest or math.isnan(beyond)
    else:
        assert beyond == math.inf


def test_e4m3_ends_where_the_next_value_would_be_nearer() -> None:
    assert FORMATS["e4m3"].last_held == (448 + 480) / 2


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_smallest_values(format: Format) -> None:
    assert rounded(format.smallest_subnormal, format) == format.smallest_subnormal
    assert rounded(format.flushed_below, format) == 0.0
    assert rounded(after(format.flushed_below), format) == format.smallest_subnormal
    assert rounded(format.smallest_normal, format) == format.smallest_normal


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_extremes_are_those_of_all_bit_patterns(format: Format) -> None:
    bits = torch.arange(2 ** (8 * format.dtype.itemsize - 1), dtype=torch.int32)
    integer = torch.uint8 if format.dtype.itemsize == 1 else torch.int16
    values = bits.to(integer).view(format.dtype).float()
    finite = values[values.isfinite()]
    assert finite.max().item() == format.largest
    assert finite[finite > 0].min().item() == format.smallest_subnormal
