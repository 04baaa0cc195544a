"""ignite: an Engine with an update function of one's own, and its trainer with our scaler."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.integrations import by_hand
from torch import nn

import halfstep

pytestmark = [
    pytest.mark.skipif(find_spec("ignite") is None, reason="ignite is not installed"),
    pytest.mark.filterwarnings(by_hand.IMPORT_WARNINGS),
]
NAME = "ignite_digits"


def trained(num: int) -> tuple[by_hand.Trained, nn.Module]:
    example = by_hand.load(NAME)
    model = example["make_model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num)
    batches, _ = example["make_batches"](num)
    done = by_hand.Trained([], [])
    scaler = halfstep.GradScaler()
    for step, batch in enumerate(batches, 1):
        one = by_hand.train(model, [batch], optimizer, 0.5, scaler)
        done.losses += one.losses
        if one.skipped:
            done.skipped.append(step)
        else:
            schedule.step()
    return done, model


def test_the_example_is_the_loop_by_hand() -> None:
    printed = by_hand.printed_by(NAME, "--steps 60")
    by_hand.assert_printed(printed, trained(60)[0])


def test_a_run_records_the_same(tmp_path: Path) -> None:
    run = by_hand.recorded(NAME, "--steps 30", tmp_path / "run")
    by_hand.assert_recorded(run, trained(30)[0])
    assert [model.name for model in run.models] == ["Sequential"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_its_trainer_takes_a_scaler_and_an_autocast() -> None:
    from ignite.engine import create_supervised_trainer

    example = by_hand.load(NAME)
    batches, _ = example["make_batches"](25)

    def under_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with halfstep.autocast("cpu", torch.float16):
            y = model(x)
            dtypes.append(y.dtype)
            return y

    model, dtypes = example["make_model"](), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = halfstep.GradScaler()
    trainer = create_supervised_trainer(
        model,
        optimizer,
        halfstep.autocast("cpu", torch.float16)(F.cross_entropy),
        amp_mode="amp",
        scaler=scaler,
        model_fn=under_autocast,
    )
    trainer.run(batches)

    other = example["make_model"]()
    by_hand.train(other, batches, torch.optim.SGD(other.parameters(), lr=0.5))
    by_hand.assert_close(model, other)
    assert set(dtypes) == {torch.float16}
    assert scaler.counts()[:2] == (24, 1)


def test_a_checkpoint_keeps_the_scaler(tmp_path: Path) -> None:
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    example = by_hand.load(NAME)
    model, batches = example["make_model"](), example["make_batches"](22)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = halfstep.GradScaler(growth_interval=5)
    trainer = Engine(lambda _, batch: by_hand.train(model, [batch], optimizer, None, scaler))
    saver = DiskSaver(str(tmp_path), require_empty=False)
    trainer.add_event_handler(
        Events.COMPLETED, Checkpoint({"model": model, "scaler": scaler}, saver)
    )
    trainer.run(batches)

    (file,) = tmp_path.glob("*.pt")
    loaded = halfstep.GradScaler()
    objects = {"model": example["make_model"](), "scaler": loaded}
    Checkpoint.load_objects(objects, torch.load(file))
    assert loaded.state_dict() == scaler.state_dict()
    assert loaded.counts() == scaler.counts()
    assert scaler.counts()[:2] == (21, 1)
    assert loaded.get_scale() > 65536
