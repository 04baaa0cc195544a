"""The states of all random number generators, kept and put back."""

from __future__ import annotations

import random
import sys
import types

import numpy as np
import pytest
import torch

from halfstep._common.random_states import RandomStates


def test_all_of_this_process_are_put_back() -> None:
    def numbers() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

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
