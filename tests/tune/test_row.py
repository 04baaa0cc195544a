import math

from halfstep._tune.difference import Difference
from halfstep._tune.row import Row, origins, worst_of


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
) -> Row:
    errors = map(off, (before, after, arriving, leaving, parameters))
    return Row(name, "Linear", True, 0.01, 0.1, *errors)


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
