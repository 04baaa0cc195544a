"""Search for islands, against all sets of a small model."""

import itertools
import random

import pytest

from halfstep._tools.tune.measurer import Islands, IslandTrial
from halfstep._tools.tune.tuner import narrowed, pruned, smallest

NAMES = tuple("abcdefghijkl")


class Model:
    """Model of the need for islands: a rule on sets of names.

    Args:
        needs: Sets of modules; each is one failure until all its modules are islands.
        tells: Whether origins are right; otherwise they are the module after the right one.
        hopeless: Failures that no island cures.
    """

    def __init__(self, needs: list[set[str]], *, tells: bool = True, hopeless: int = 0) -> None:
        self.needs, self.tells, self.hopeless = needs, tells, hopeless
        self.looked: list[Islands] = []

    def look(self, islands: Islands) -> IslandTrial:
        if islands not in self.looked:
            self.looked.append(islands)
        open_needs = [need for need in self.needs if not need <= set(islands)]
        origins = [min(need) if self.tells else "l" for need in open_needs]
        suspects = [*NAMES[6:], *NAMES[:6]]
        return IslandTrial(len(open_needs) + self.hopeless, tuple(origins), tuple(suspects))


def is_minimal(model: Model, islands: Islands) -> bool:
    most = model.look(islands).num_failing
    return all(model.look(tuple(set(islands) - {name})).num_failing > most for name in islands)


def test_a_healthy_model_is_looked_at_once() -> None:
    model = Model([])
    assert smallest(model.look) == ()
    assert model.looked == [()]


def test_single_modules_are_found_where_failures_begin() -> None:
    model = Model([{"b"}, {"e"}, {"k"}])
    assert set(smallest(model.look)) == {"b", "e", "k"}
    assert len(model.looked) <= 2 + 3  # none, all three, and without each


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_none_can_be_dropped_and_none_is_missing(seed: int, tells: bool) -> None:
    chosen = random.Random(seed)
    needs = [set(chosen.sample(NAMES, chosen.randint(1, 3))) for _ in range(chosen.randint(0, 4))]
    model = Model(needs, tells=tells)
    islands = smallest(model.look)
    assert set(islands) == set().union(*needs)
    assert is_minimal(model, islands)
    again = Model(needs, tells=tells)
    assert (smallest(again.look), again.looked) == (islands, model.looked[: len(again.looked)])


def test_one_of_two_is_enough() -> None:
    def look(islands: Islands) -> IslandTrial:
        is_cured = "a" in islands or {"b", "c"} <= set(islands)
        return IslandTrial(0 if is_cured else 1, ("c",), NAMES)

    islands = smallest(look)
    sets = [set(names) for n in range(4) for names in itertools.combinations(NAMES, n)]
    assert set(islands) in ({"a"}, {"b", "c"})
    assert not any(look(tuple(each)).num_failing == 0 for each in sets if each < set(islands))


def test_what_no_island_cures_keeps_those_that_help() -> None:
    model = Model([{"c"}], hopeless=1)
    assert smallest(model.look) == ("c",)


def test_pruning_takes_few_measurements() -> None:
    model = Model([{"d"}])
    assert pruned(model.look, NAMES) == ("d",)
    assert len(model.looked) <= 10


def test_a_few_ops_replace_an_island_if_they_are_enough() -> None:
    def look(islands: Islands) -> IslandTrial:
        is_block_good = "block" in islands or {"mul@block", "exp@block"} <= set(islands)
        num_failing = (not is_block_good) + ("other" not in islands)
        return IslandTrial(num_failing, (), ("block", "other"))

    ops = {"block": ["linear", "mul", "exp", "sin"], "other": []}
    found = narrowed(look, ("block", "other"), ops)
    assert set(found) == {"other", "mul@block", "exp@block"}
    assert narrowed(look, ("block", "other"), {"block": ["mul", "sin"]}) == ("block", "other")


def test_many_ops_do_not() -> None:
    ops = [f"op{n}" for n in range(4)]

    def look(islands: Islands) -> IslandTrial:
        is_good = "a" in islands or {f"{op}@a" for op in ops} <= set(islands)
        return IslandTrial(0 if is_good else 1, ("a",), ("a",))

    assert narrowed(look, ("a",), {"a": ops}) == ("a",)
