"""Differences of tensors, and where a failure of modules begins."""

import math

import pytest
import torch
from torch import Tensor

from halfstep._tools.tune.module_check import (
    UNCOMPARABLE,
    Difference,
    ModuleCheck,
    amax,
    difference,
    origins,
    worst_of,
)


def obvious(seen: Tensor, wanted: Tensor, scale: float = 1.0) -> Difference:
    """One entry after the other."""
    total = Difference()
    pairs = zip(seen.flatten().tolist(), wanted.flatten().tolist(), strict=True)
    for value, right in pairs:
        value /= scale
        if not math.isfinite(right):
            continue
        nonzero = int(right != 0)
        if math.isfinite(value):
            total += Difference(
                1, (value - right) ** 2, right**2, 0, int(nonzero and value == 0), nonzero
            )
        else:
            total += Difference(size=1, overflow=1)
    return total


INF, NAN = math.inf, math.nan
CASES = {
    "rounded": ([0.1, -2.0, 3.3], [0.1, -2.0, 3.3]),
    "flushed": ([0.0, 1.0, 0.0, 0.0], [1e-9, 1.0, 0.0, -1e-12]),
    "overflow": ([INF, 1.0, NAN, -INF], [1e6, 1.0, 2.0, -1e5]),
    "on purpose": ([-INF, 1.0, NAN], [-INF, 1.01, NAN]),
    "all lost": ([NAN, NAN], [1.0, 2.0]),
    "large": ([1.0, 60000.0], [3e38, 60001.0]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_is_what_a_loop_counts(name: str, dtype: torch.dtype) -> None:
    seen, wanted = (torch.tensor(values) for values in CASES[name])
    found, right = difference(seen.to(dtype), wanted), obvious(seen.to(dtype), wanted)
    assert found.square_error == pytest.approx(right.square_error)
    assert found.square_norm == pytest.approx(right.square_norm)
    counts = ("overflow", "flushed", "nonzero")
    if not right.overflow:  # what overflowed has no part in the other counts
        assert [getattr(found, c) for c in counts] == [getattr(right, c) for c in counts]
    assert (found.size, found.overflow) == (right.size, right.overflow)


def test_a_scaled_tensor_is_unscaled() -> None:
    wanted = torch.tensor([1e-9, 2e-9])
    found = difference((wanted * 2.0**20).half(), wanted, scale=2.0**20)
    assert found.error < 1e-3
    assert found.flushed == 0


def test_differences_add_up() -> None:
    seen, wanted = torch.randn(4, 8).half(), torch.randn(4, 8)
    whole = difference(seen, wanted)
    parts = difference(seen[:1], wanted[:1]) + difference(seen[1:], wanted[1:])
    assert parts.error == pytest.approx(whole.error)
    assert (parts.size, parts.nonzero) == (whole.size, whole.nonzero)


def test_errors() -> None:
    assert Difference().error == 0.0
    assert Difference(size=1, square_error=1e-20).error == 1.0  # zero in float32
    assert Difference(size=2, square_norm=1.0, overflow=1).error == math.inf
    assert Difference(size=4, overflow=1, nonzero=2, flushed=1).overflow_share == 0.25
    assert Difference(size=4, overflow=1, nonzero=2, flushed=1).underflow_share == 0.5


def test_other_shapes_and_layouts() -> None:
    assert difference(torch.ones(2), torch.ones(3)) == UNCOMPARABLE
    assert UNCOMPARABLE.error == 1.0
    sparse = torch.eye(3).to_sparse()
    assert difference(sparse, torch.eye(3).to_sparse()).error == 0.0
    assert amax(sparse * -2) == 2.0
    assert amax(torch.tensor([])) == 0.0


def off(error: float) -> Difference:
    if math.isinf(error):
        return Difference(size=1, overflow=1)
    return Difference(size=1, square_error=error**2, square_norm=1.0)


def row(
    name: str,
    before: float = 0.0,
    after: float = 0.0,
    arriving: float = 0.0,
    leaving: float = 0.0,
    parameters: float = 0.0,
) -> ModuleCheck:
    errors = map(off, (before, after, arriving, leaving, parameters))
    return ModuleCheck(name, "Linear", True, 0.01, 0.1, *errors)


def test_a_module_fails_by_output_gradient_or_parameters() -> None:
    assert row("a", after=0.01, arriving=0.1, parameters=0.1).passed
    assert not row("a", after=0.011).passed
    assert not row("a", arriving=0.11).passed
    assert not row("a", parameters=0.11).passed
    assert row("a", before=1.0, leaving=1.0).passed  # those are other modules'
    assert row("a", after=0.02, parameters=0.1).severity == 2.0
    assert row("a", after=0.02, parameters=0.1).worst == (0.02, 0.01)


def test_a_failure_begins_where_what_goes_in_is_good() -> None:
    rows = [row("", 0, 1), row("a", 0, 0.001), row("b", 0.001, math.inf), row("c", math.inf, 1)]
    assert origins(rows) == ["b"]


def test_a_container_is_to_blame_only_if_none_in_it_is() -> None:
    inner = row("block.inner", 0, 1)
    assert origins([row("", 0, 1), row("block", 0, 1), inner]) == ["block.inner"]
    assert origins([row("", 0, 1), row("block", 0, 1), row("block.inner")]) == ["block"]
    assert origins([row("block", 0, 1), row("blocks", 0, 1)]) == ["block", "blocks"]


def test_backward_it_begins_where_the_gradient_that_arrives_is_good() -> None:
    rows = [row(""), row("a", arriving=1, leaving=1), row("b", leaving=1), row("c")]
    assert origins(rows) == ["b"]
    assert origins([row("a", parameters=1)]) == ["a"]


def test_a_bad_gradient_from_the_loss_is_no_modules() -> None:
    rows = [row("", arriving=1), row("a", arriving=1, leaving=1), row("b", arriving=0, leaving=1)]
    assert origins(rows) == [""]


def test_nothing_begins_where_all_pass() -> None:
    assert origins([row("a", leaving=1), row("b", before=1)]) == []


def test_after_a_bad_forward_pass_gradients_are_not_looked_at() -> None:
    assert origins([row("a", 0, 1), row("b", 1, 1, arriving=0, leaving=1)]) == ["a"]


def test_what_a_module_adds() -> None:
    assert row("a", 0.003, 0.005).added == 0.4
    assert row("a", math.inf, math.inf).added == 0.0
    assert row("a", 0, math.inf).added == math.inf


def test_of_several_batches_the_worst() -> None:
    good, bad = row("a", 0, 0.001), row("a", 0, 0.5)
    assert worst_of([[good, row("b")], [bad]]) == [bad, row("b")]
