"""Rounding against a table of every value that a format has, and a search for the nearest."""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor

from halfstep._numerics.formats import FORMATS, Format, rounded

ALL = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
INF, NAN = math.inf, math.nan
# (bits of the exponent, bits of the fraction)
LAYOUT = {"fp16": (5, 10), "bf16": (8, 7), "e4m3": (4, 3), "e5m2": (5, 2)}


@cache
def magnitudes(name: str) -> list[float]:
    """Return every finite value from zero up, by its bit pattern, and the one that comes next.

    Read off the definition of the format, not off PyTorch. That the next one is there only to
    find the ties; it is beyond the format.
    """
    exponent_bits, fraction_bits = LAYOUT[name]
    bias = 2 ** (exponent_bits - 1) - 1
    if name == "e4m3":
        num_finite = 2 ** (exponent_bits + fraction_bits) - 1  # all but one: NaN
    else:
        num_finite = (2**exponent_bits - 1) << fraction_bits

    def value(bits: int) -> float:
        exponent, fraction = bits >> fraction_bits, bits % (1 << fraction_bits)
        if exponent == 0:
            return math.ldexp(fraction, 1 - bias - fraction_bits)
        return math.ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits)

    return [value(bits) for bits in range(num_finite + 1)]


def nearest(name: str, value: float, *, saturate: bool) -> float:
    """Return the nearest value of a format, the one with even bits of two that are as near."""
    if math.isnan(value):
        return NAN
    table, size = magnitudes(name), abs(value)
    last = len(table) - 2
    below = min(bisect_right(table, size) - 1, last) if size < INF else last
    if size > table[-1]:
        bits = last + 1
    else:
        to_below = Fraction(size) - Fraction(table[below])
        to_above = Fraction(table[below + 1]) - Fraction(size)
        is_above = to_above < to_below or (to_above == to_below and below % 2 == 1)
        bits = below + is_above
    if bits <= last or saturate:
        return math.copysign(table[min(bits, last)], value)
    return NAN if name == "e4m3" else math.copysign(INF, value)


def check(values: Tensor, format: Format) -> None:
    assert values.dtype == torch.float32
    for saturate in (True, False):
        found = rounded(values, format, saturate=saturate)
        wanted = torch.tensor(
            [nearest(format.name, x, saturate=saturate) for x in values.tolist()],
            dtype=torch.float32,
        )
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit() | found.isnan(), wanted.signbit() | wanted.isnan())


@ALL
def test_every_bit_pattern_is_held_as_it_is(format: Format) -> None:
    bits = 16 if format.dtype.itemsize == 2 else 8
    as_int = torch.int16 if bits == 16 else torch.uint8
    patterns = torch.arange(2**bits, dtype=torch.int32).to(as_int)
    values = patterns.view(format.dtype).float()
    torch.testing.assert_close(
        rounded(values, format, saturate=False), values, rtol=0, atol=0, equal_nan=True
    )
    finite = values[values.isfinite()]
    assert torch.equal(rounded(finite, format, saturate=True), finite)
    table = torch.tensor(magnitudes(format.name)[:-1], dtype=torch.float64).float()
    assert torch.equal(finite[~finite.signbit()].sort().values, table)


@pytest.mark.slow
@ALL
def test_midpoints_of_all_neighbours_and_what_is_beside_them(format: Format) -> None:
    table = torch.tensor(magnitudes(format.name), dtype=torch.float64)
    middle = (table[:-1] + (table[1:] - table[:-1]) / 2).float()
    up, down = torch.tensor(INF), torch.tensor(-INF)
    values = torch.cat([middle, torch.nextafter(middle, up), torch.nextafter(middle, down)])
    check(torch.cat([values, -values]), format)


@pytest.mark.slow
@ALL
def test_random_bits_of_float32(format: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=generator, dtype=torch.int64)
    anywhere = bits.to(torch.int32).view(torch.float32)
    exponents = torch.randint(-30, 20, (20_000,), generator=generator)
    in_range = torch.randn(20_000, generator=generator) * 2.0**exponents
    check(torch.cat([anywhere, in_range]), format)


@ALL
def test_ends_of_the_range(format: Format) -> None:
    last = torch.tensor(format.last_held)
    beyond = torch.nextafter(last, torch.tensor(INF))
    tiny = torch.tensor(format.flushed_below)
    specials = torch.tensor([0.0, -0.0, INF, -INF, NAN, 3.4028235e38, 1e-45, -1e-45])
    values = torch.stack([last, -last, beyond, tiny, torch.nextafter(tiny, last)])
    check(torch.cat([values, specials]), format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_too(dtype: torch.dtype) -> None:
    values = torch.randn(500).to(dtype)
    format = FORMATS["e5m2"]
    assert torch.equal(
        rounded(values, format, saturate=True), rounded(values.float(), format, saturate=True)
    )
