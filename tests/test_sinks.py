"""Scalars of a recorded run on their way to TensorBoard, W&B and others."""

import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.record.training import Net, train

import halfstep
from halfstep._tools.record.read import read_run
from halfstep.sinks import TensorBoard, WandB


class Collector:
    def __init__(self) -> None:
        self.calls: list[tuple[int, Mapping[str, float]]] = []

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.calls.append((step, dict(scalars)))


def record_to(folder: Path, sink: object) -> None:
    torch.manual_seed(0)
    scaler = halfstep.GradScaler("cpu", init_scale=2.0**28)
    with halfstep.record(folder, every=8, sinks=[sink]):  # type: ignore[list-item]
        train(Net(), 16, scaler=scaler, max_norm=1.0)


def test_a_sink_gets_what_the_record_holds(tmp_path: Path) -> None:
    sink = Collector()
    record_to(tmp_path, sink)
    recorded = read_run(tmp_path)
    steps = [(step, scalars) for step, scalars in sink.calls if "skipped" in scalars]
    assert [step for step, _ in steps] == [*range(1, 17)]
    for (_, scalars), step in zip(steps, recorded.steps, strict=True):
        assert (scalars["loss"], scalars["scale"]) == (step.loss, step.scale)
        assert scalars["skipped"] == (not step.taken)
    samples = [(step, scalars) for step, scalars in sink.calls if "headroom" in scalars]
    assert [step for step, _ in samples] == [1, 2, 4, 8, 16]
    assert all(0.0 <= scalars["underflow"] <= 1.0 for _, scalars in samples)
    assert samples[0][1]["non_finite"] > 0  # it overflows at first
    assert samples[-1][1]["non_finite"] == 0


def test_a_sink_that_fails_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    class Broken:
        def log(self, step: int, scalars: Mapping[str, float]) -> None:
            raise ConnectionError("gone")

    with pytest.warns(
        UserWarning, match="continues without Broken.*ConnectionError: gone"
    ) as warned:
        record_to(tmp_path, Broken())
    assert len(warned) == 1
    assert len(read_run(tmp_path).steps) == 16


def test_tensorboard_gets_them_under_halfstep(tmp_path: Path) -> None:
    class Writer:
        written: list[tuple[str, float, int]] = []  # noqa: RUF012

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.written.append((name, value, step))

    TensorBoard(Writer()).log(3, {"loss": 1.5})
    assert Writer.written == [("halfstep/loss", 1.5, 3)]


def test_tensorboard_is_asked_for_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        TensorBoard("runs/tb")


def test_wandb_goes_along_with_a_run_and_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, float], bool]] = []
    wandb = types.ModuleType("wandb")
    wandb.run = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ValueError, match=r"no W&B run is running.*wandb\.init"):
        WandB()
    wandb.run = types.SimpleNamespace(  # type: ignore[attr-defined]
        log=lambda values, commit: logged.append((values, commit))
    )
    WandB().log(7, {"scale": 2.0})
    assert logged == [({"halfstep/scale": 2.0, "halfstep/step": 7}, False)]
