"""Checkpoints through torch.distributed.checkpoint: saved on two ranks, read by any number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.ranks import cases
from tests.ranks.pool import Pool
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import halfstep

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Training:
    """A sharded model, its optimizer and its scaler; the same data on any number of ranks."""

    def __init__(self, *, is_sharded: bool = True) -> None:
        self.module = cases.fsdp2() if is_sharded else cases.model()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.scaler = halfstep.GradScaler(init_scale=1024.0, growth_interval=2)

    def step(self, number: int) -> tuple[float, bool]:
        self.optimizer.zero_grad()
        cases.backward(self.scaler, self.module, cases.batch(0, number))
        if number in (1, 6):
            next(self.module.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()
        return self.scaler.get_scale(), self.scaler.outcome(self.optimizer).taken

    def weights(self) -> list[torch.Tensor]:
        return [
            (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
            for param in self.module.parameters()
        ]

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler}

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def steps(self, first: int, last: int) -> Any:
        return [self.step(number) for number in range(first, last)], self.weights()


def save(rank: int, folder: str) -> Any:
    training = Training()
    training.steps(0, 5)
    training.save(folder)
    return training.steps(5, 10)


def go_on(rank: int, folder: str) -> Any:
    training = Training()
    training.load(folder)
    return training.steps(5, 10)


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-7)


def test_training_goes_on_as_if_it_had_not_been_interrupted(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved, _ = pool.run(save, folder)
    assert not all(taken for _, taken in saved[0])  # the scale still moves
    for found in pool.run(go_on, folder):
        assert_same(found, saved)
    alone = Training(is_sharded=False)
    alone.load(folder)
    assert_same(alone.steps(5, 10), saved)


@pytest.mark.ranks4
def test_on_four_ranks_too(pool: Pool, pool4: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved, _ = pool.run(save, folder)
    for found in pool4.run(go_on, folder):
        assert_same(found, saved)


def test_the_scaler_is_stateful() -> None:
    assert isinstance(halfstep.GradScaler(), Stateful)
