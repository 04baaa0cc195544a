"""Rounds of steps without a scaler."""

import gc

import pytest
import torch

from halfstep._tools.rounds import Rounds


@pytest.mark.parametrize(
    ("steps", "rounds"),
    [
        ("aaa", 3),
        ("abab", 2),
        ("ababba", 3),
        ("aab", 3),  # b steps for the first time in the second round
        ("aabab", 4),
        ("abaab", 3),
        ("abcabc", 2),
    ],
)
def test_each_optimizer_steps_once_in_a_round(steps: str, rounds: int) -> None:
    weights = [torch.nn.Parameter(torch.zeros(1))]
    optimizers = {name: torch.optim.SGD(weights, lr=0.1) for name in set(steps)}
    counted = Rounds()
    assert not counted
    assert sum(counted.add(optimizers[name]) for name in steps) == rounds
    assert counted


def test_a_round_is_open_until_all_known_optimizers_have_stepped() -> None:
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2))
    counted, seen = Rounds(), []
    for optimizer in (one, other, one):
        counted.add(optimizer)
        seen.append(counted.is_open)
    counted.end()
    assert (seen, counted.is_open) == ([False, False, True], False)
    assert counted.add(other)


def test_a_round_outlives_an_optimizer_of_it_unless_another_one_comes() -> None:
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2))
    counted, replaced = Rounds(), Rounds()
    begins = [counted.add(each) for each in (one, other, one, other, one)] + [replaced.add(one)]
    del one
    gc.collect()
    assert [counted.add(other), replaced.add(other)] == [False, True]
    assert begins == [True, False, True, False, True, True]
