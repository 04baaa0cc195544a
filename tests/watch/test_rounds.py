"""Rounds of steps without a scaler."""

import gc
from pathlib import Path

import pytest
import torch

from halfstep import GradScaler, record
from halfstep._tools.record.read import read_run
from halfstep._tools.rounds import Rounds
from halfstep._tools.watch.watch import Watch


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


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("has_record", [False, True])
@pytest.mark.parametrize(
    ("order", "bad"), [("DG", 2), ("DG", 3), ("DDDDDG", 8), ("DDDDDG", 11), ("DGG", 5), ("DGG", 6)]
)
def test_a_loss_has_the_number_of_the_step_that_it_leads_to(
    order: str, bad: int, has_record: bool, has_scaler: bool, tmp_path: Path
) -> None:
    critic, generator = torch.nn.Linear(3, 1), torch.nn.Linear(2, 3)
    scaler = GradScaler("cpu", 1.0, on_skips=lambda _: None, enabled=has_scaler)
    told: list[int] = []
    optimizers = {
        name: torch.optim.SGD(model.parameters(), 0.01)
        for name, model in {"D": critic, "G": generator}.items()
    }

    def number(is_counted: bool) -> int:
        is_known = has_record and run.num_steps
        return (run.num_steps if is_counted else run.current_step) if is_known else 0

    with record(tmp_path) as run, Watch(tell=lambda _, n: told.append(n), seconds=0, number=number):
        for i, name in enumerate(order * 3):
            optimizers[name].zero_grad()
            for is_last in (False, True) if bad % 2 else (True,):  # accumulated
                fake = generator(torch.ones(8, 2))
                loss = critic(fake.detach() if name == "D" else fake).square().mean()
                loss = loss * torch.log(torch.tensor(float(i != bad or not is_last)))
                scaler.scale(loss).backward()
            scaler.step(optimizers[name])
            scaler.update()
    assert told == [read_run(tmp_path).steps[bad].step]
