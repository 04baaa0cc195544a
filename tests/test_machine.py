"""Which of several processes this is, and the states of its random number generators."""

from __future__ import annotations

import random
import sys
import types

import numpy as np
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from halfstep._common.machine import RandomStates, num_ranks, rank


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "", "WORLD_SIZE": ""}, (0, 1)),
        ({"RANK": "-1", "WORLD_SIZE": "0"}, (0, 1)),
        ({"RANK": "first", "WORLD_SIZE": "x"}, (0, 1)),
    ],
)
def test_what_is_no_number_of_a_launcher_is_left_out(environ, expected) -> None:
    assert (rank(environ), num_ranks(environ)) == expected


def test_without_a_launcher_the_process_group_knows() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        assert (rank({}), num_ranks({})) == (2, 3)
        assert (rank({"RANK": "1"}), num_ranks({"WORLD_SIZE": "4"})) == (1, 4)
    finally:
        torch.distributed.destroy_process_group()


# --- random numbers -------------------------------------------------------------------------------


def test_all_of_this_process_are_put_back() -> None:
    def numbers() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    numbers()  # numpy imports numpy.random when it is first used
    states = RandomStates([])
    first = numbers()
    assert numbers() != first
    states.restore()
    assert numbers() == first


def test_numpy_that_is_not_loaded_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy.random")
    states = RandomStates([])
    assert "numpy.random" not in sys.modules
    monkeypatch.undo()
    expected = np.random.get_state()[1].copy()  # type: ignore[index]
    states.restore()
    assert np.array_equal(np.random.get_state()[1], expected)  # type: ignore[index]


def test_the_given_devices_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {torch.device("cuda", 0): 1, torch.device("cuda", 1): 2, torch.device("cuda", 2): 3}
    module = types.SimpleNamespace(
        get_rng_state=states.__getitem__,
        set_rng_state=lambda state, device: states.__setitem__(device, state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    kept = RandomStates(map(torch.device, ("cuda:0", "cpu", "meta", "cuda:1")))
    states.update(dict.fromkeys(states, 9))
    kept.restore()
    assert list(states.values()) == [1, 2, 9]
