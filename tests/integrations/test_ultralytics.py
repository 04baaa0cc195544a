"""ultralytics: a callback that puts halfstep's scaler in place of the trainer's."""

import copy
import math
import pickle
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.integrations import by_hand
from torch import nn

import halfstep
from halfstep.integrations.ultralytics import use_scaler

needs_ultralytics = pytest.mark.skipif(
    find_spec("ultralytics") is None,
    reason="ultralytics is not installed (needs torchvision): pip install 'halfstep[ultralytics]'",
)
NAME = "ultralytics_digits"
BROKEN = 2  # the place of a broken batch


# --- a trainer that is none -----------------------------------------------------------------------


def stub(scaler: torch.amp.GradScaler, resume: bool = False) -> SimpleNamespace:
    return SimpleNamespace(model=nn.Linear(4, 1), scaler=scaler, resume=resume)


def test_a_resumed_run_keeps_its_scale() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=500)
    trainer = stub(theirs, resume=True)
    use_scaler(trainer)
    assert isinstance(trainer.scaler, halfstep.GradScaler)
    assert trainer.scaler.get_scale() == 2.0**9
    assert trainer.scaler.get_growth_interval() == 500


def test_a_new_run_has_the_settings_of_the_scaler() -> None:
    trainer = stub(torch.amp.GradScaler("cpu"))
    callback = partial(use_scaler, scaler=halfstep.GradScaler(init_scale=2.0**9))
    # To other processes, for training on several GPUs, callbacks go pickled.
    pickle.loads(pickle.dumps(callback))(trainer)
    assert trainer.scaler.get_scale() == 2.0**9


def test_one_that_is_off_stays_off() -> None:
    trainer = stub(theirs := torch.amp.GradScaler("cpu", enabled=False))
    use_scaler(trainer)
    assert trainer.scaler is theirs


def test_it_knows_the_names_of_the_parameters() -> None:
    trainer = stub(torch.amp.GradScaler("cpu"))
    use_scaler(trainer)
    optimizer = torch.optim.SGD(trainer.model.parameters())
    trainer.scaler.scale((trainer.model(torch.ones(1, 4)) * torch.nan).sum()).backward()
    trainer.scaler.step(optimizer)
    trainer.scaler.update()
    assert trainer.scaler.outcome(optimizer).culprits == ["weight", "bias"]


# --- the real one ---------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))


def switch_on(trainer) -> None:
    """Let a trainer use mixed precision on a CPU, where it never does, with PyTorch's scaler."""
    trainer.amp = True
    trainer.scaler = torch.amp.GradScaler("cpu")
    if trainer.resume:  # as on a GPU, where its scaler is on when the checkpoint is read
        trainer.scaler.load_state_dict(
            torch.load(trainer.args.resume, weights_only=False)["scaler"]
        )


def digits_model(folder: Path):
    """Write images to a folder and return a model."""
    from ultralytics import YOLO

    example = by_hand.load(NAME)
    example["write_images"](folder)
    (folder / "digits-cls.yaml").write_text(example["MODEL"])
    return YOLO(folder / "digits-cls.yaml")


def options_in(folder: Path) -> dict[str, object]:
    """Return what ``YOLO.train`` needs for seven steps on a CPU."""
    return {
        "data": folder,
        "imgsz": 32,
        "batch": 32,
        "nbs": 32,
        "fraction": 0.25,
        "device": "cpu",
        "optimizer": "SGD",
        "project": folder,
        "plots": False,
        "warmup_epochs": 0,
        "val": False,
    }


@needs_ultralytics
def test_a_run_of_the_example_is_recorded(tmp_path: Path, settings: None) -> None:
    run = by_hand.recorded(NAME, "--epochs 1", tmp_path / "run")
    assert len(run.steps) == 25
    assert all(step.taken for step in run.steps)
    assert run.steps[-1].loss < run.steps[0].loss
    assert [model.name for model in run.models] == ["ClassificationModel"]


@needs_ultralytics
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_trains_as_a_loop_by_hand(tmp_path: Path, settings: None) -> None:
    from ultralytics.models.yolo.classify import ClassificationTrainer

    seen, losses, start, ends = [], [], [], []

    class Trainer(ClassificationTrainer):
        """Keeps its batches, and breaks one."""

        def preprocess_batch(self, batch):
            batch = super().preprocess_batch(batch)
            if len(seen) == BROKEN:
                batch["img"][0] = torch.nan
            seen.append({name: value for name, value in batch.items() if name in ("img", "cls")})
            return batch

    ours = halfstep.GradScaler(init_scale=2.0**10, growth_interval=3)
    model = digits_model(tmp_path)
    for callback in (
        lambda trainer: start.append(copy.deepcopy((trainer.model, trainer.optimizer))),
        switch_on,
        partial(use_scaler, scaler=ours),
    ):
        model.add_callback("on_train_start", callback)
    model.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss.item()))
    model.add_callback("on_train_epoch_end", lambda trainer: ends.append(trainer.model))
    model.train(trainer=Trainer, epochs=1, **options_in(tmp_path))

    ((copied, optimizer),) = start
    scaler = halfstep.GradScaler(init_scale=2.0**10, growth_interval=3)
    for batch, expected in zip(seen, losses, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = copied(batch)[0].sum()
        assert repr(loss.item()) == repr(expected)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(copied.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [number for number, loss in enumerate(losses) if math.isnan(loss)] == [BROKEN]
    assert ours.counts() == scaler.counts() == (6, 1, 0, None)
    assert ours.state_dict() == scaler.state_dict()
    assert all(weight.isfinite().all() for weight in by_hand.weights(copied))
    torch.testing.assert_close(by_hand.weights(ends[0]), by_hand.weights(copied), rtol=0, atol=0)


@needs_ultralytics
@pytest.mark.filterwarnings("ignore")
def test_a_run_that_is_resumed_goes_on_with_the_scale(tmp_path: Path, settings: None) -> None:
    from ultralytics import YOLO

    saved, resumed = tmp_path / "saved.pt", []

    def end(trainer) -> None:
        shutil.copy(trainer.last, saved)
        raise KeyboardInterrupt

    model = digits_model(tmp_path)
    ours = halfstep.GradScaler(init_scale=2.0**10, growth_interval=3)
    model.add_callback("on_train_start", switch_on)
    model.add_callback("on_train_start", partial(use_scaler, scaler=ours))
    model.add_callback("on_model_save", end)
    with pytest.raises(KeyboardInterrupt):
        model.train(epochs=2, **options_in(tmp_path))
    assert ours.counts().taken == 7
    assert ours.get_scale() == 2.0**12

    def look(trainer) -> None:
        resumed.append((trainer.start_epoch, trainer.scaler.state_dict()))
        raise KeyboardInterrupt

    again = YOLO(saved)
    again.add_callback("on_train_start", switch_on)
    again.add_callback("on_train_start", use_scaler)
    again.add_callback("on_train_start", look)
    with pytest.raises(KeyboardInterrupt):
        again.train(resume=True)
    ((epoch, state),) = resumed
    assert epoch == 1
    kept = ("scale", "growth_interval", "_growth_tracker")
    assert {key: state[key] for key in kept} == {key: ours.state_dict()[key] for key in kept}
